"""Reads a file in Criteo's layout in batches, as users of other systems do, and prints a line of JSON.

The layout is a label, 13 counts and 26 ids, separated by tabs without a header, or the same columns as Parquet.
A batch has labels, log(1 + x) of the counts (0 for a missing one), and 64-bit hashes of the ids."""

import argparse
import gzip
import io
import json
import os
import pathlib
import time

DENSE = [f"I{i}" for i in range(1, 14)]
SPARSE = [f"C{i}" for i in range(1, 27)]
COLUMNS = ["label"] + DENSE + SPARSE
BATCH = 8192


def prepare(text):
    """Writes the rows in the other formats, next to the text file."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet
    import zstandard

    data = pathlib.Path(text).read_bytes()
    pathlib.Path(f"{text}.gz").write_bytes(gzip.compress(data, 6))
    pathlib.Path(f"{text}.zst").write_bytes(zstandard.ZstdCompressor(3).compress(data))
    types = {name: pyarrow.int64() for name in ["label"] + DENSE} | {name: pyarrow.string() for name in SPARSE}
    table = pyarrow.csv.read_csv(
        io.BytesIO(data),
        read_options=pyarrow.csv.ReadOptions(column_names=COLUMNS),
        parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    pyarrow.parquet.write_table(table, pathlib.Path(text).with_suffix(".parquet"), row_group_size=16 * BATCH)


def pandas_batches(path):
    import numpy
    import pandas

    if path.endswith(".parquet"):
        import pyarrow.parquet

        frames = (batch.to_pandas() for batch in pyarrow.parquet.ParquetFile(path).iter_batches(BATCH))
    else:
        types = {name: "float32" for name in ["label"] + DENSE} | {name: "str" for name in SPARSE}
        frames = pandas.read_csv(path, sep="\t", names=COLUMNS, dtype=types, chunksize=BATCH)
    for frame in frames:
        dense = numpy.log1p(frame[DENSE].to_numpy("float32", na_value=0.0).clip(min=0.0))
        ids = [pandas.util.hash_array(frame[name].fillna("").to_numpy(object), categorize=False) for name in SPARSE]
        yield frame["label"].to_numpy("float32"), dense, ids


def polars_batches(path):
    import polars

    if path.endswith(".parquet"):
        frame = polars.scan_parquet(path)
    else:
        types = {name: polars.Float32 for name in ["label"] + DENSE} | {name: polars.String for name in SPARSE}
        frame = polars.scan_csv(path, separator="\t", has_header=False, schema=types)
    dense = [polars.col(name).cast(polars.Float32).fill_null(0.0).clip(lower_bound=0.0).log1p() for name in DENSE]
    frame = frame.select([polars.col("label").cast(polars.Float32), *dense, *[polars.col(name).hash() for name in SPARSE]])
    for part in frame.collect(engine="streaming").iter_slices(BATCH):
        yield part["label"].to_numpy(), part.select(DENSE).to_numpy(), [part[name].to_numpy() for name in SPARSE]


def torch_batches(path, threads):
    import math

    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Lines(IterableDataset):
        def __iter__(self):
            worker = get_worker_info()
            opened = gzip.open(path, "rt") if path.endswith(".gz") else open(path, encoding="utf-8")
            with opened as lines:
                for number, line in enumerate(lines):
                    if number % worker.num_workers == worker.id:
                        fields = line.rstrip("\n").split("\t")
                        dense = [math.log1p(max(float(x), 0.0)) if x else 0.0 for x in fields[1:14]]
                        yield float(fields[0]), dense, [hash(x) for x in fields[14:]]

    def collate(rows):
        labels, dense, ids = zip(*rows)
        return torch.tensor(labels), torch.tensor(dense), torch.tensor(ids)

    yield from DataLoader(Lines(), batch_size=BATCH, num_workers=threads, collate_fn=collate)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--peer", choices=["pandas", "polars", "torch"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.file)
        return
    os.environ["POLARS_MAX_THREADS"] = str(arguments.threads)
    batches = {
        "pandas": lambda: pandas_batches(arguments.file),
        "polars": lambda: polars_batches(arguments.file),
        "torch": lambda: torch_batches(arguments.file, arguments.threads),
    }[arguments.peer]
    # The first batch imports modules, so it is not measured.
    next(iter(batches()))
    started, rows, positive = time.perf_counter(), 0, 0.0
    for labels, _dense, _ids in batches():
        rows += len(labels)
        positive += float(labels.sum())
    seconds = time.perf_counter() - started
    print(json.dumps({"samplesPerSecond": rows / seconds, "rows": rows, "positive": positive}))


if __name__ == "__main__":
    main()
