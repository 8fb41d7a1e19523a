"""The work that all peers do, and its measurement. It contains no peer."""

import argparse
import json
import statistics
import time

import numpy

FEATURES, DIM, DENSE, ROWS, ZIPF = 26, 16, 13, 2_000_000, 1.05
TOWERS = {"a": [4096, 2048, 1024, 512, 256], "b": [512, 256, 128]}
BATCHES = {"a": 1024, "b": 4096, "dlrm": 4096, "job": 4096}


def arguments(description, peers):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=list(BATCHES), required=True)
    parser.add_argument("--peer", choices=peers, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch", type=int)
    return parser.parse_args()


def id_batches(batch, steps):
    """Ids [FEATURES, batch] of each step, including the three unmeasured steps at the beginning."""
    generator = numpy.random.default_rng(1)
    ids = lambda: zipf_ids(FEATURES * batch, ROWS // FEATURES, generator).reshape(FEATURES, batch)
    return [ids() for _ in range(steps + 3)]


def zipf_ids(count, rows, generator):
    """Ids with a continuous Zipf distribution, drawn by its inverse, as in Rectrain's benchmarks."""
    power = 1.0 - ZIPF
    uniform = generator.random(count)
    ranks = ((uniform * ((rows + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power)) - 1.0
    return numpy.minimum(ranks.astype(numpy.int64), rows - 1)


def measure(step, batch, steps):
    seconds = []
    for count in range(steps + 3):
        begin = time.perf_counter()
        step(count)
        if count >= 3:
            seconds.append(time.perf_counter() - begin)
    return {"samplesPerSecond": batch / statistics.median(seconds), "stepSeconds": statistics.median(seconds)}


def report(args, batch, figures):
    print(json.dumps({"work": args.work, "peer": args.peer, "threads": args.threads, "batch": batch, **figures}))
