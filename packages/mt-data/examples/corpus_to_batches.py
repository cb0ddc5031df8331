"""From text to training batches and evaluation windows, with numpy and tokenizers only.

Run: python corpus_to_batches.py
"""

import tempfile
from itertools import islice
from pathlib import Path

import mt_data
import mt_tokenizer


def main() -> None:
    sources = mt_data.standard_library_sources()
    kept, held_out = mt_data.split_files(sources[:60], fraction=0.1, seed=0)
    print(f"{len(kept)} files to train on, {len(held_out)} held out")

    texts = (document.text for document in mt_data.read_documents(kept))
    tokenizer = mt_tokenizer.train_tokenizer(texts, 1000, pattern="code")

    with tempfile.TemporaryDirectory() as folder:
        train = Path(folder, "train")
        stats = mt_data.build_corpus(mt_data.read_documents(kept), train, tokenizer)
        print(f"{stats.tokens} tokens, {stats.bytes_per_token:.2f} bytes each")

        indexed = mt_data.IndexedDataset(train)
        dataset = mt_data.GPTDataset(indexed, sequence_length=64, num_samples=1000, seed=1)

        # Two data-parallel ranks share global batch 7; no rank needs the steps before it.
        for rank in range(2):
            sampler = mt_data.BatchSampler(
                dataset, global_batch_size=8, micro_batch_size=2, dp_rank=rank, dp_size=2
            )
            ids = [batch["sample_ids"].tolist() for batch in sampler.step(7)]
            print(f"rank {rank} trains on samples {ids} at step 7")

        valid = Path(folder, "valid")
        mt_data.build_corpus(mt_data.read_documents(held_out), valid, tokenizer)
        windows = mt_data.SequentialWindows(
            mt_data.IndexedDataset(valid), 64, start_id=tokenizer.eod_id
        )
        labels = [batch["labels"] for batch in windows.batches(4)]
        counted = sum(
            int(tokenizer.token_bytes[block[block != mt_data.PADDING]].sum()) for block in labels
        )
        size = sum(len(path.read_bytes()) for path in held_out)
        print(f"labels of {len(windows)} windows stand for {counted} of {size} bytes")
        assert counted == size

        text = tokenizer.decode(next(islice(windows.batches(1), 1))["tokens"][0])
        print(f"the first window begins with {text[:60]!r}")


if __name__ == "__main__":
    main()
