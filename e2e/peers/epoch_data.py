"""The rows of `--work epoch`: a label, 13 counts and 26 whole ids, as tab-separated text with a header and as Parquet.

    python epoch_data.py FOLDER      writes train.parquet and test.parquet beside train.tsv and test.tsv

A reader yields batches of labels [B], log(1 + x) of the counts [B, 13] (0 for a missing one) and ids [26, B]. An id is
the index of a row, so a peer hashes nothing. It contains no peer."""

import argparse
import os
import pathlib
import queue
import threading

import numpy

from work import BATCHES

BATCH = BATCHES["job"]
COUNTS = [f"I{index}" for index in range(1, 14)]
IDS = [f"C{index}" for index in range(1, 27)]
# The batches of a row group of Parquet, and of a part that polars reads at a time.
PART_BATCHES = 32
# The batches that wait at most between the thread that reads and the thread that trains.
WAITING_BATCHES = 16


def prepare(folder):
    """Writes the rows as Parquet too. A file has its name only when it is complete."""
    import pyarrow.parquet

    for name in ["train", "test"]:
        table = pyarrow.Table.from_batches(arrow_parts(f"{folder}/{name}.tsv"))
        part = f"{folder}/{name}.parquet.part"
        pyarrow.parquet.write_table(table, part, row_group_size=PART_BATCHES * BATCH)
        os.replace(part, f"{folder}/{name}.parquet")


def arrow_parts(path, worker=0, workers=1):
    """Record batches of a file. Of Parquet only each `workers`-th row group; text cannot be divided."""
    if path.endswith(".parquet"):
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path)
        groups = list(range(worker, file.num_row_groups, workers))
        return file.iter_batches(BATCH, row_groups=groups)
    import pyarrow
    import pyarrow.csv

    types = {name: pyarrow.int64() for name in ["label"] + COUNTS + IDS}
    return pyarrow.csv.open_csv(
        path,
        parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types),
    )


def arrow_batches(path, worker=0, workers=1):
    """Batches by pyarrow."""

    def arrays(part):
        counts = [part.column(name).fill_null(0).to_numpy(zero_copy_only=False) for name in COUNTS]
        dense = numpy.log1p(numpy.stack(counts, 1, dtype=numpy.float32))
        ids = numpy.stack([part.column(name).to_numpy(zero_copy_only=False) for name in IDS])
        return part.column("label").to_numpy(zero_copy_only=False).astype(numpy.float32), dense, ids

    return cut(arrays(part) for part in arrow_parts(path, worker, workers))


def polars_batches(path):
    """Batches by polars, which reads and converts with its own threads."""
    import polars

    if path.endswith(".parquet"):
        frame = polars.scan_parquet(path)
    else:
        types = {name: polars.Int64 for name in ["label"] + COUNTS + IDS}
        frame = polars.scan_csv(path, separator="\t", schema=types)
    dense = [polars.col(name).cast(polars.Float32).fill_null(0.0).log1p() for name in COUNTS]
    frame = frame.select([polars.col("label").cast(polars.Float32), *dense, *IDS])

    def arrays(part):
        ids = numpy.ascontiguousarray(part.select(IDS).to_numpy().T)
        return part["label"].to_numpy(), part.select(COUNTS).to_numpy(), ids

    return cut(arrays(part) for part in frame.collect_batches(chunk_size=PART_BATCHES * BATCH, maintain_order=True))


def cut(parts):
    """Cuts parts of any length into batches of `BATCH` rows; the last batch may be shorter."""
    rest = None
    for labels, dense, ids in parts:
        if rest is not None:
            labels = numpy.concatenate([rest[0], labels])
            dense = numpy.concatenate([rest[1], dense])
            ids = numpy.concatenate([rest[2], ids], axis=1)
        whole = len(labels) // BATCH * BATCH
        for first in range(0, whole, BATCH):
            rows = slice(first, first + BATCH)
            yield labels[rows], dense[rows], ids[:, rows]
        rest = (labels[whole:], dense[whole:], ids[:, whole:])
    if rest is not None and len(rest[0]) > 0:
        yield rest


def ahead(batches):
    """The same batches, read by another thread."""
    waiting = queue.Queue(WAITING_BATCHES)

    def read():
        try:
            for batch in batches:
                waiting.put(batch)
            waiting.put(None)
        except BaseException as error:
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    while (batch := waiting.get()) is not None:
        if isinstance(batch, BaseException):
            raise batch
        yield batch


def area_under_curve(scores, labels):
    """The area under the ROC curve. Equal scores count half."""
    scores, labels = numpy.asarray(scores, numpy.float64), numpy.asarray(labels, numpy.float64)
    order = numpy.argsort(scores, kind="stable")
    _, first, counts = numpy.unique(scores[order], return_index=True, return_counts=True)
    ranks = first + (counts + 1) / 2
    positives = labels.sum()
    wins = ranks @ numpy.add.reduceat(labels[order], first) - positives * (positives + 1) / 2
    return float(wins / (positives * (len(labels) - positives)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    prepare(parser.parse_args().folder)


if __name__ == "__main__":
    main()
