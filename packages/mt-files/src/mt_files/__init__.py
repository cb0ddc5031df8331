"""Files from outside: checked reading, typed content, durable writing, locks and digests."""

from typing import TYPE_CHECKING

from mt_files.argument import absolute_path as absolute_path
from mt_files.argument import check_type as check_type
from mt_files.argument import local_path as local_path
from mt_files.argument import multiples_near as multiples_near
from mt_files.argument import object_url as object_url
from mt_files.digest import known_sha256 as known_sha256
from mt_files.digest import sha256_file as sha256_file
from mt_files.error import FileError as FileError
from mt_files.error import LockedError as LockedError
from mt_files.error import MissingFileError as MissingFileError
from mt_files.error import ObjectError as ObjectError
from mt_files.error import UserError as UserError
from mt_files.experimental import ExperimentalWarning as ExperimentalWarning
from mt_files.experimental import experimental as experimental
from mt_files.field import Checks as Checks
from mt_files.field import FieldError as FieldError
from mt_files.field import describe as describe
from mt_files.field import did_you_mean as did_you_mean
from mt_files.field import divisors as divisors
from mt_files.field import hints_of as hints_of
from mt_files.field import listed as listed
from mt_files.field import shorten as shorten
from mt_files.later import MissingExtraError as MissingExtraError
from mt_files.later import import_failure as import_failure
from mt_files.later import quick_imports as quick_imports
from mt_files.later import require as require
from mt_files.later import resolve_later as resolve_later
from mt_files.lock import FolderLock as FolderLock
from mt_files.reading import open_file as open_file
from mt_files.reading import parse_json as parse_json
from mt_files.reading import read_bytes as read_bytes
from mt_files.reading import read_json as read_json
from mt_files.reading import read_text as read_text
from mt_files.reading import without_collection as without_collection
from mt_files.row import STAGES as STAGES
from mt_files.row import RowField as RowField
from mt_files.row import Stage as Stage
from mt_files.schema import MAX_PROBLEMS as MAX_PROBLEMS
from mt_files.schema import Bound as Bound
from mt_files.schema import FieldProblem as FieldProblem
from mt_files.schema import PlainText as PlainText
from mt_files.schema import SchemaError as SchemaError
from mt_files.schema import bind as bind
from mt_files.schema import build as build
from mt_files.schema import kinds_of as kinds_of
from mt_files.schema import to_plain as to_plain
from mt_files.writing import remove_temporaries as remove_temporaries
from mt_files.writing import sync as sync
from mt_files.writing import write_file as write_file
from mt_files.writing import writing as writing

if TYPE_CHECKING:
    from mt_files.command import Command as Command
    from mt_files.command import run_command as run_command
    from mt_files.command import say as say
    from mt_files.document import Document as Document
    from mt_files.document import parse_yaml as parse_yaml
    from mt_files.document import read_yaml as read_yaml
    from mt_files.folder import OccupiedError as OccupiedError
    from mt_files.folder import check_free as check_free
    from mt_files.folder import new_folder as new_folder
    from mt_files.objects import ObjectInfo as ObjectInfo
    from mt_files.objects import ObjectStore as ObjectStore
    from mt_files.objects import ObjectTries as ObjectTries
    from mt_files.objects import StoredObject as StoredObject
    from mt_files.objects import find_object as find_object
    from mt_files.objects import objects_under as objects_under
    from mt_files.progress import Progress as Progress
    from mt_files.safetensors import SAFETENSORS_DTYPES as SAFETENSORS_DTYPES
    from mt_files.safetensors import SafetensorsError as SafetensorsError
    from mt_files.safetensors import TensorEntry as TensorEntry
    from mt_files.safetensors import open_safetensors as open_safetensors
    from mt_files.safetensors import plan_safetensors as plan_safetensors
    from mt_files.safetensors import safetensors_header as safetensors_header
    from mt_files.safetensors import safetensors_in as safetensors_in
    from mt_files.safetensors import safetensors_index as safetensors_index
else:
    __getattr__ = resolve_later(__name__)  # YAML needs an extra, and an import stays light
