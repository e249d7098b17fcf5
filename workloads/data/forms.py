"""The forms in which a user's table may be: CSV, JSON lines, Parquet, Arrow, and pictures in a folder for each class.

Every form gives Arrow record batches, so that one workload reads all of them. pyarrow.dataset reads texts, and
Pillow pictures.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
from pyarrow import csv, dataset, ipc
from pyarrow import json as json_lines

from ..files.roots import damaged
from .images import CHUNK, batches, parquet

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The ends of the names of pictures, as in torchvision."""

GIVEN = "given"
"""The folder in the cache with the tables that `fedfleet.table` has written."""

BLOCK = 1 << 23
"""The bytes of a text that are parsed together. Types are inferred from the first of them."""


class Reads(NamedTuple):
    """How columns are read from texts, which have no types. `numbers`: columns of numbers. `names`: columns of names,
    in which 1 and 01 are different."""

    numbers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Form(ABC):
    """One form of files."""

    suffixes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def schema(self, path: Path) -> Any:
        """The Arrow schema of a file; ValueError if it is damaged."""

    @abstractmethod
    def batches(self, path: Path, columns: Sequence[str], rows: int, reads: Reads) -> Iterator[Any]:
        """The named columns of a file as Arrow record batches of at most about `rows` rows, in their order."""

    def size(self, path: Path) -> int:
        """The number of rows of a file, 0 if it is not known before it is read."""
        return 0

    def files(self, path: Path) -> list[Path]:
        """What a path of the table stands for on the disk, for digests."""
        return [path]


class ParquetFiles(Form):
    suffixes = (".parquet", ".pq")

    def schema(self, path: Path) -> Any:
        return parquet(path).schema_arrow

    def batches(self, path: Path, columns: Sequence[str], rows: int, reads: Reads) -> Iterator[Any]:
        return batches(path, columns, rows)

    def size(self, path: Path) -> int:
        return parquet(path).metadata.num_rows


class Texts(Form):
    """Texts with a row on each line, which pyarrow.dataset reads."""

    @abstractmethod
    def read(self, path: Path, types: dict[str, Any]) -> Any:
        """The data set of pyarrow.dataset with one file. types: Arrow types of columns."""

    @abstractmethod
    def types(self, schema: Any, reads: Reads) -> dict[str, Any]:
        """The Arrow types of columns, where what was inferred from the first rows could be too narrow."""

    def schema(self, path: Path) -> Any:
        try:
            return self.read(path, {}).schema
        except (pa.ArrowException, OSError) as error:
            raise self.unreadable(path, error) from error

    def batches(self, path: Path, columns: Sequence[str], rows: int, reads: Reads) -> Iterator[Any]:
        types = self.types(self.schema(path), reads)
        try:
            scan = self.read(path, types).scanner(columns=list(columns), batch_size=rows, batch_readahead=2)
            yield from scan.to_batches()
        except (pa.ArrowException, OSError) as error:
            raise self.unreadable(path, error) from error

    def unreadable(self, path: Path, error: Exception) -> ValueError:
        said = str(error).splitlines()[0].rpartition("file?: ")[2].rstrip(". ")
        return ValueError(f"{path} must be a whole table, got one that cannot be read ({said}); correct that row")


class Csv(Texts):
    """Comma-separated values with a header; semicolons and tabs may take the place of commas."""

    suffixes = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

    def read(self, path: Path, types: dict[str, Any]) -> Any:
        with pa.input_stream(str(path)) as stream:
            header = stream.read(1 << 16).split(b"\n")[0]
        delimiter = max(",", ";", "\t", key=lambda one: header.count(one.encode()))
        form = dataset.CsvFileFormat(
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            read_options=csv.ReadOptions(block_size=BLOCK),
            convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=True),
        )
        return dataset.dataset(str(path), format=form)

    def types(self, schema: Any, reads: Reads) -> dict[str, Any]:
        numbers = {name: pa.float64() for name in reads.numbers if not pa.types.is_boolean(schema.field(name).type)}
        return {**numbers, **dict.fromkeys(reads.names, pa.string())}


class JsonLines(Texts):
    """One JSON object on each line."""

    suffixes = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz")

    def read(self, path: Path, types: dict[str, Any]) -> Any:
        parse = json_lines.ParseOptions(explicit_schema=pa.schema(list(types.items())) if types else None)
        form = dataset.JsonFileFormat(
            default_fragment_scan_options=dataset.JsonFragmentScanOptions(
                parse, json_lines.ReadOptions(block_size=BLOCK)
            )
        )
        return dataset.dataset(str(path), format=form)

    def types(self, schema: Any, reads: Reads) -> dict[str, Any]:
        return {name: floats(schema.field(name).type) for name in reads.numbers}

    def unreadable(self, path: Path, error: Exception) -> ValueError:
        if "array" in str(error) or "JSON parse error: A document" in str(error):
            return ValueError(
                f"{path}: found JSON that is no object on each line ({str(error).splitlines()[0]}); convert it: "
                f"pandas.read_json({str(path)!r}).to_json({str(path.with_suffix('.jsonl'))!r}, orient='records', "
                "lines=True)"
            )
        return super().unreadable(path, error)


def floats(kind: Any) -> Any:
    """An Arrow type with float64 in the place of whole numbers and of nothing, also in lists."""
    if pa.types.is_list(kind):
        return pa.list_(floats(kind.value_type))
    return pa.float64() if pa.types.is_integer(kind) or pa.types.is_null(kind) else kind


class ArrowFiles(Form):
    """Arrow's files and streams; the latter are in the folders of `datasets.save_to_disk`."""

    suffixes = (".arrow", ".feather")

    def reader(self, path: Path) -> Any:
        try:
            mapped = pa.memory_map(str(path))
            head = mapped.read(6)
            mapped.seek(0)
            return ipc.open_file(mapped) if head == b"ARROW1" else ipc.open_stream(mapped)
        except (pa.ArrowException, OSError) as error:
            raise damaged(path, error) from error

    def schema(self, path: Path) -> Any:
        return self.reader(path).schema

    def batches(self, path: Path, columns: Sequence[str], rows: int, reads: Reads) -> Iterator[Any]:
        reader = self.reader(path)
        try:
            if isinstance(reader, ipc.RecordBatchFileReader):
                found = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                found = iter(reader)
            for batch in found:
                for begin in range(0, len(batch), rows):
                    yield batch.select(list(columns)).slice(begin, rows)
        except (pa.ArrowException, OSError) as error:
            raise damaged(path, error) from error


class Pictures(Form):
    """A folder that has a folder of pictures for each class, as torchvision's ImageFolder reads it. The columns are
    "image" and "label"."""

    SCHEMA: ClassVar[Any] = pa.schema({"image": pa.binary(), "label": pa.string()})

    def found(self, path: Path) -> list[tuple[str, str]]:
        """(file, class) of every picture, in the order of torchvision's ImageFolder, which takes two seconds to import.
        Raises ValueError if a class has none."""
        found = []
        for name in sorted(one.name for one in os.scandir(path) if one.is_dir()):
            inside = [
                (os.path.join(folder, file), name)
                for folder, _, files in sorted(os.walk(path / name, followlinks=True))
                for file in sorted(files)
                if file.lower().endswith(PICTURE_SUFFIXES)
            ]
            if not inside:
                raise ValueError(f"{path / name}: found no pictures; missing {', '.join(PICTURE_SUFFIXES)}")
            found += inside
        return found

    def schema(self, path: Path) -> Any:
        return self.SCHEMA

    def batches(self, path: Path, columns: Sequence[str], rows: int, reads: Reads) -> Iterator[Any]:
        found = self.found(path)
        for begin in range(0, len(found), CHUNK):
            some = found[begin : begin + CHUNK]
            images = pa.array([content(file) for file, _ in some], pa.binary())
            yield pa.record_batch([images, pa.array([name for _, name in some], pa.string())], self.SCHEMA)

    def files(self, path: Path) -> list[Path]:
        return [Path(file) for file, _ in self.found(path)]


def content(file: str) -> bytes:
    with open(file, "rb", buffering=0) as opened:
        return opened.read()


FORMS: tuple[Form, ...] = (ParquetFiles(), Csv(), JsonLines(), ArrowFiles())
"""The forms that a file's name tells."""

PICTURES = Pictures()

KNOWN = "CSV, JSON lines, Parquet, Arrow, a folder of `datasets.save_to_disk`, or a folder with pictures of each class"

CONVERT = {
    ".xlsx": "pandas.read_excel({0!r}).to_parquet({1!r})",
    ".xls": "pandas.read_excel({0!r}).to_parquet({1!r})",
    ".ods": "pandas.read_excel({0!r}).to_parquet({1!r})",
    ".pkl": "pandas.read_pickle({0!r}).to_parquet({1!r})",
    ".pickle": "pandas.read_pickle({0!r}).to_parquet({1!r})",
    ".h5": "pandas.read_hdf({0!r}).to_parquet({1!r})",
    ".hdf5": "pandas.read_hdf({0!r}).to_parquet({1!r})",
    ".dta": "pandas.read_stata({0!r}).to_parquet({1!r})",
    ".sav": "pandas.read_spss({0!r}).to_parquet({1!r})",
    ".sas7bdat": "pandas.read_sas({0!r}).to_parquet({1!r})",
    ".xml": "pandas.read_xml({0!r}).to_parquet({1!r})",
    ".orc": "pandas.read_orc({0!r}).to_parquet({1!r})",
    ".txt": "pandas.read_csv({0!r}, sep=None, engine='python').to_csv({2!r}, index=False)",
    ".data": "pandas.read_csv({0!r}, sep=None, engine='python', header=None).to_csv({2!r}, index=False)",
    ".dat": "pandas.read_csv({0!r}, sep=None, engine='python', header=None).to_csv({2!r}, index=False)",
    ".npz": "f = numpy.load({0!r}); workload = fedfleet.table((f['x'], f['y']))",
    ".npy": "workload = fedfleet.table((numpy.load({0!r}), labels))",
    ".pt": "inputs, labels = torch.load({0!r}); workload = fedfleet.table((inputs, labels))",
    ".mat": "f = scipy.io.loadmat({0!r}); workload = fedfleet.table((f['x'], f['y'].ravel()))",
    ".zip": "shutil.unpack_archive({0!r}, {3!r})",
    ".tar": "shutil.unpack_archive({0!r}, {3!r})",
    ".tgz": "shutil.unpack_archive({0!r}, {3!r})",
    ".wav": "x, rate = torchaudio.load({0!r}); features = torchaudio.transforms.MelSpectrogram(rate)(x)",
    ".mp3": "x, rate = torchaudio.load({0!r}); features = torchaudio.transforms.MelSpectrogram(rate)(x)",
    ".flac": "x, rate = torchaudio.load({0!r}); features = torchaudio.transforms.MelSpectrogram(rate)(x)",
}
"""The end of a file's name -> the line of Python that makes something readable of it: {0} is the file, {1} a Parquet
file, {2} a CSV file, {3} a folder."""


class Part(NamedTuple):
    """The rows of a table for one purpose: paths that `form` reads."""

    form: Form
    paths: list[Path]

    @property
    def files(self) -> list[Path]:
        return [file for path in self.paths for file in self.form.files(path)]


def form_of(path: Path) -> Form | None:
    """The form of a file by its name; None if no form has such names."""
    return next((form for form in FORMS if path.name.lower().endswith(form.suffixes)), None)


def cannot_be_read(path: Path) -> ValueError:
    """The error for a file of no form."""
    suffix = next((one for one in CONVERT if path.name.lower().endswith(one)), "")
    others = (str(path), *(str(path.with_suffix(one)) for one in (".parquet", ".csv", "")))
    remedy = f"convert it: {CONVERT[suffix].format(*others)}" if suffix else "convert it to one of them"
    return ValueError(f"{path}: found a file {path.suffix or 'without a suffix'}, wanted {KNOWN}; {remedy}")


def parts_of(path: Path, test: Path | None, together: bool) -> tuple[Part, Part]:
    """(training part, test part) of a table. test: where its test rows are, None if `path` has them too. together:
    whether training and test rows are in the same files, for which both parts are the same. Raises ValueError with what
    was found if that is no table."""
    if test is not None:
        return part_of(path), part_of(test)
    if together:
        part = part_of(path)
        return part, part
    found = {name: split for name, split in splits_in(path).items() if split is not None}
    if "train" in found and "test" in found:
        return found["train"], found["test"]
    there = f"{', '.join(found)}" if found else "rows without parts"
    raise ValueError(
        f"{path}: found {there}; missing test rows: set workload.test to their file or folder, workload.test_fraction "
        "to 0.2, or workload.split_column"
    )


def splits_in(path: Path) -> dict[str, Part | None]:
    """Name -> part, of a folder that has parts for different purposes: those of `datasets.DatasetDict`, folders of
    pictures, or files whose names begin with train, test and so on. {} if it has none."""
    if not path.is_dir():
        return {}
    if (path / "dataset_dict.json").is_file():
        names = read_json(path / "dataset_dict.json").get("splits", [])
        return {name: part_of(path / name) for name in names}
    files = table_files(path)
    if files:
        names = ("train", "test", "validation", "dev")
        of = {name: [file for file in files if file.name.lower().startswith(name)] for name in names}
        return {name: same_form(path, some) for name, some in of.items() if some}
    folders = {folder.name.lower(): folder for folder in path.iterdir() if folder.is_dir()}
    return {name: Part(PICTURES, [folder]) for name, folder in sorted(folders.items()) if has_classes(folder)}


def part_of(path: Path) -> Part:
    """The rows of a file, of all files of a pattern, or of a folder. Raises ValueError with what was found there."""
    if "*" in path.name:
        return same_form(path, sorted(one for one in path.parent.glob(path.name) if one.is_file()))
    if path.is_file():
        if (form := form_of(path)) is None:
            raise cannot_be_read(path)
        return Part(form, [path])
    if not path.is_dir():
        again = "; give the data to fedfleet.table again, which writes it" if path.parent.name == GIVEN else ""
        raise ValueError(f"path must name a file, a folder or a pattern such as data/*.csv, got no such {path}{again}")
    if (path / "state.json").is_file():
        named = [path / entry["filename"] for entry in read_json(path / "state.json").get("_data_files", [])]
        return same_form(path, named)
    if (path / "dataset_dict.json").is_file():
        names = ", ".join(read_json(path / "dataset_dict.json").get("splits", []))
        raise ValueError(f"{path}: found the parts {names}; set workload.path to one of its folders")
    if files := table_files(path):
        return same_form(path, files)
    if has_classes(path):
        return Part(PICTURES, [path])
    inside = sorted(one for one in path.rglob("*") if one.is_file())
    if strange := next((one for one in inside if any(one.name.lower().endswith(end) for end in CONVERT)), None):
        raise cannot_be_read(strange)
    there = ", ".join(sorted(one.name for one in path.iterdir())[:5]) or "an empty folder"
    raise ValueError(f"{path}: found {there}; missing a table: {KNOWN}")


def table_files(path: Path) -> list[Path]:
    """The files of some form in a folder, or in the folder "data" inside of it, sorted by name."""
    for place in (path, path / "data"):
        if place.is_dir() and (files := [one for one in sorted(place.iterdir()) if one.is_file() and form_of(one)]):
            return [file for file in files if not file.name.startswith((".", "_"))]
    return []


def same_form(path: Path, files: Sequence[Path]) -> Part:
    """The part with these files. Raises ValueError unless they are there and of one form. path: where they are."""
    forms = list(dict.fromkeys(form_of(file) for file in files))
    if not files:
        raise ValueError(f"{path}: found no files; missing a table: {KNOWN}")
    if len(forms) > 1 or forms[0] is None:
        names = ", ".join(file.name for file in files[:5])
        raise ValueError(f"{path}: found files of several forms, {names}; set workload.path to one, or to a pattern")
    return Part(forms[0], list(files))


def has_classes(path: Path) -> bool:
    """Whether a folder has a folder with a picture."""
    folders = [one for one in path.iterdir() if one.is_dir()]
    return any(file.name.lower().endswith(PICTURE_SUFFIXES) for folder in folders for file in folder.iterdir())


def read_json(path: Path) -> dict[str, Any]:
    """A file of `datasets.save_to_disk`. Raises ValueError if it is damaged."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return found if isinstance(found, dict) else {}


def class_names(schema: Any, column: str) -> tuple[str, ...]:
    """The names of the classes of a column, or of its lists, that Hugging Face's ClassLabel has; () without them."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        kind = features[column]
        while "names" not in kind:
            kind = kind[0] if isinstance(kind, list) else kind["feature"]
        return tuple(map(str, kind["names"]))
    except (KeyError, TypeError, IndexError, ValueError):
        return ()
