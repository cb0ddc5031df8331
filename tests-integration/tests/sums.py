"""A kind of rows of a user's own: sums, of which the digits behind `=` are learnt."""

import hashlib
from dataclasses import dataclass

import numpy as np
from mt_data import PADDING, Permutation, RowDataset
from mt_files import RowField
from mt_train import DataSection

SIGNS = "0123456789+= "
FIELDS = (
    RowField(name="tokens", fill=SIGNS.index(" "), is_tokens=True),
    RowField(name="labels", fill=PADDING, is_tokens=True, counts="tokens"),
    RowField(name="mask", dtype="bool", cut="whole"),
    RowField(name="answer", dims=(), cut="once"),  # which no model reads
)


class Sums(RowDataset):
    """Rows `12+30=42`, or with the answer reversed; a line of a text file has both terms."""

    fields = FIELDS

    def __init__(self, path, length, seed, *, reverse):
        self.sequence_length, self.seed, self.reverse = length, seed, reverse
        self.terms = [[int(term) for term in line.split()] for line in path.open()]

    def __len__(self):
        return len(self.terms)

    @property
    def fingerprint(self):
        return hashlib.sha256(repr((self.terms, self.seed, self.reverse)).encode()).hexdigest()

    def row(self, index):
        epoch, place = divmod(index, len(self))
        terms = self.terms[Permutation(len(self), self.seed, "sums", epoch)(place)]
        question, row = f"{terms[0]}+{terms[1]}=", self.empty()
        answer = str(sum(terms))[:: -1 if self.reverse else 1]
        ids = np.array([SIGNS.index(sign) for sign in question + answer])
        row["tokens"][: len(ids) - 1], row["mask"][: len(ids) - 1] = ids[:-1], True
        row["labels"][len(question) - 1 : len(ids) - 1] = ids[len(question) :]
        return row | {"answer": np.array(sum(terms))}


@dataclass(frozen=True, kw_only=True)
class SumsData(DataSection):
    """Sums of two numbers; with `reverse` the answer's last digit is learnt first."""

    type_name, endings = "sums", ("",)
    needs_tokenizer, has_few_labels = False, True
    reverse: bool = False

    def fields(self):
        return FIELDS

    def dataset(self, path, sources):
        return Sums(path, sources.sequence_length, sources.seed, reverse=self.reverse)
