"""Answers the requests that `rectrain-bench serve --save FILE` wrote, with PyTorch or onnxruntime in this process.
Prints one line of JSON with the requests a second.

    python serve.py --peer onnxruntime --model FOLDER --requests FILE

    onnxruntime   the exported `tower.onnx`; the rows of all tables are one NumPy array
    torch         the same parameters, compiled by torch.compile (inductor) together with the look-up of the rows

FOLDER is an export for serving of a DLRM with values of f32. A peer first answers all requests, and its
probabilities must be the server's to 1e-5. Then each of `ARRANGEMENTS` runs for SECONDS, and the fastest counts.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path

# The parent only prepares arrays, and forks. So it may have no threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy

sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))

TOLERANCE = 1e-5
# The longest wait for the other processes, in seconds. Compiling takes minutes.
PATIENCE = 900
# Requests that a run of the tower answers together.
TOGETHER = [1, 4]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["onnxruntime", "torch"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each arrangement")
    return parser.parse_args()


def arrangements(threads):
    """Processes, threads of each, and requests of a run: one process with all threads, or a thread a process."""
    return [(processes, threads // processes, together) for processes in sorted({1, threads}) for together in TOGETHER]


class Prepared:
    """A table of rows, and the inputs of each request: places in the table, numbers, and expected answers."""

    def __init__(self, folder, requests):
        model = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        check(model, folder)
        self.sparse = model["sparseFeatures"]
        self.table, self.places = table(folder, model, self.sparse, requests)
        sparse, dense = ([feature["name"] for feature in model[kind]] for kind in ("sparseFeatures", "denseFeatures"))
        self.rows = [self.row_places(request, sparse) for request in requests]
        self.dense = [numbers(request, dense) for request in requests]
        self.expected = [numpy.array(request["probabilities"], numpy.float32) for request in requests]

    def row_places(self, request, names):
        ids = [cells(request, name) for name in names]
        return numpy.array([[place[id] for id in column] for place, column in zip(self.places, ids)], numpy.int64).T.copy()

    def batches(self, together):
        """The inputs of several requests in one array, for each run."""
        starts = range(0, len(self.rows) - together + 1, together)
        join = lambda parts, start: numpy.concatenate(parts[start : start + together])
        return [tuple(join(parts, start) for parts in (self.rows, self.dense, self.expected)) for start in starts]


def check(model, folder):
    problem = None
    if model["identity"]["model"]["kind"] != "dlrm":
        problem = "its model is no dlrm"
    elif len(model["rows"]) != 1 or model["rows"][0]["valueType"] != "f32":
        problem = "it has several row groups, or values that are not f32"
    elif any(feature["separator"] is not None for feature in model["sparseFeatures"]):
        problem = "a feature has several values"
    elif any(feature["transform"] != "log1p" for feature in model["denseFeatures"]):
        problem = "a dense feature has another transform than log1p"
    if problem:
        sys.exit(f"{folder}/model.json: expected the model of docs/development/benchmarks.md, and {problem}")


def cells(request, name):
    """The values of an input, one for each candidate. A user's value is repeated."""
    data = next(tensor["data"] for tensor in request["request"]["inputs"] if tensor["name"] == name)
    count = len(request["probabilities"])
    return data * count if len(data) == 1 else data


def numbers(request, names):
    return numpy.array([cells(request, name) for name in names], numpy.float32).T.copy()


def table(folder, model, sparse, requests):
    """All rows of the model, and after them the initial values of the ids without a row.
    Also the place in it of each id, for each feature."""
    from rectrain_predict.keys import key_in_table
    from rectrain_predict.model import Rows

    initial = model["initialValues"]
    rows = Rows(folder, model["rows"][0], initial["seed"], initial["groups"][model["rows"][0]["group"]])
    parts, total, places = [rows.values], len(rows.values), []
    for feature in sparse:
        ids = sorted({id for request in requests for id in cells(request, feature["name"])})
        seed = int(feature["tableSeed"], 16)
        keys = numpy.array([key_in_table(id, seed, feature.get("hashBuckets")) for id in ids], numpy.uint64)
        found = numpy.minimum(numpy.searchsorted(rows.keys, keys), len(rows.keys) - 1)
        absent = rows.keys[found] != keys
        found[absent] = total + numpy.arange(absent.sum())
        if absent.any():
            parts.append(rows.read(keys[absent]))
        total += int(absent.sum())
        places.append(dict(zip(ids, found.tolist())))
    return numpy.concatenate(parts), places


def fields(message):
    """The numbers and contents of the fields of a protobuf message."""
    at = 0

    def integer():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = integer()
        if tag & 7 == 0:
            yield tag >> 3, integer()
            continue
        length = {1: 8, 5: 4}.get(tag & 7) or integer()
        yield tag >> 3, message[at : at + length]
        at += length


def constants(path):
    """The arrays of an ONNX graph, by name (onnx.proto: ModelProto 7, GraphProto 5, TensorProto 1, 2, 8 and 9)."""
    graph = next(value for field, value in fields(path.read_bytes()) if field == 7)
    arrays = {}
    for field, tensor in fields(graph):
        if field == 5:
            parts = list(fields(tensor))
            name, kind, raw = (next(value for number, value in parts if number == wanted) for wanted in (8, 2, 9))
            shape = [size for number, value in parts if number == 1 for size in sizes(value)]
            # TensorProto.DataType: 1 is FLOAT, 7 is INT64.
            arrays[name.decode()] = numpy.frombuffer(raw, {1: "<f4", 7: "<i8"}[kind]).reshape(shape)
    return arrays


def sizes(packed):
    """The sizes of a tensor, packed into one field or in a field each."""
    if isinstance(packed, int):
        return [packed]
    # A field of one number for each, so that `fields` reads them.
    return [value for _, value in fields(b"".join(b"\x08" + number for number in split(packed)))]


def split(packed):
    start = 0
    for end, byte in enumerate(packed, 1):
        if byte < 128:
            yield packed[start:end]
            start = end


def with_onnxruntime(prepared, folder, threads):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(folder / "tower.onnx"), options, providers=["CPUExecutionProvider"])

    def answer(rows, dense):
        embeddings = prepared.table.take(rows.reshape(-1), axis=0).reshape(len(rows), -1)
        dense = numpy.log1p(numpy.maximum(dense, 0))
        return session.run(["probability"], {"dense": dense, "embeddings": embeddings})[0][:, 0]

    return answer, lambda batch: batch


def with_torch(prepared, folder, threads):
    # Compile in this process, so that no compiling process outlives it.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    import torch._inductor.config

    if not any(map(shutil.which, filter(None, [os.environ.get("CXX"), "g++", "clang++", "c++"]))):
        sys.exit("torch.compile needs a C++ compiler, and there is none: install g++")
    torch.set_num_threads(threads)
    # The code in inductor's cache contains its number of threads, so the cache must know it.
    torch._inductor.config.cpp.threads = threads
    parameters = {name: torch.from_numpy(array.copy()) for name, array in constants(folder / "tower.onnx").items()}
    # The only constant as long as the pairs of 27 vectors is the list of their places.
    pairs = max((p for p in parameters.values() if p.dtype == torch.int64), key=len)
    rows_of_all = torch.from_numpy(prepared.table)

    def mlp(values, name, layers, last_relu):
        for layer in layers:
            values = torch.addmm(parameters[f"{name}.{layer}.bias"].view(-1), values, parameters[f"{name}.{layer}.weight"])
            if layer != layers[-1] or last_relu:
                values = torch.relu(values)
        return values

    def forward(rows, dense):
        bottom = mlp(torch.log1p(torch.relu(dense)), "bottom", ["0", "1", "output"], True)
        embeddings = torch.nn.functional.embedding(rows, rows_of_all)
        vectors = torch.cat([bottom[:, None, :], embeddings], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)
        return torch.sigmoid(mlp(torch.cat([bottom, dots], 1), "top", ["0", "1", "logit"], False))[:, 0]

    compiled = torch.compile(forward, dynamic=False)

    def answer(rows, dense):
        with torch.inference_mode():
            return compiled(rows, dense).numpy()

    return answer, lambda batch: (torch.from_numpy(batch[0]), torch.from_numpy(batch[1]), batch[2])


def work(args, prepared, threads, together, start, results):
    """Checks all answers, waits for the other processes, and answers for the time. Sends the answered requests, the
    seconds, and the largest difference from the server."""
    try:
        make = with_onnxruntime if args.peer == "onnxruntime" else with_torch
        answer, converted = make(prepared, args.model, threads)
        batches = [converted(batch) for batch in prepared.batches(together)]
        difference = max(float(numpy.abs(answer(*batch[:2]) - batch[2]).max()) for batch in batches)
        if not difference <= TOLERANCE:
            raise ValueError(f"an answer is {difference} from the server's; expected at most {TOLERANCE}")
        start.wait(PATIENCE)
        begin, runs = time.perf_counter(), 0
        while time.perf_counter() - begin < args.seconds:
            answer(*batches[runs % len(batches)][:2])
            runs += 1
        results.put((runs * together, time.perf_counter() - begin, difference))
    except BaseException as error:
        start.abort()
        results.put(repr(error))


def measure(args, prepared, arrangement):
    processes, threads, together = arrangement
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(processes), context.SimpleQueue()
    of_each = (args, prepared, threads, together, start, results)
    children = [context.Process(target=work, args=of_each) for _ in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        if child.exitcode != 0:
            sys.exit(f"{args.peer}: a process ended with status {child.exitcode}")
    # They are small, so each process could put its own without a reader.
    outcomes = [results.get() for _ in children]
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if failures:
        # A process that waits for a failed one only reports its broken barrier.
        sys.exit(f"{args.peer}: " + min(failures, key=lambda failure: "BrokenBarrier" in failure))
    rate = sum(requests / seconds for requests, seconds, _ in outcomes)
    shape = {"processes": processes, "threadsOfEach": threads, "requestsOfARun": together}
    return {**shape, "requestsPerSecond": rate, "largestDifference": max(outcome[2] for outcome in outcomes)}


def main():
    args = arguments()
    with args.requests.open(encoding="utf-8") as lines:
        requests = [json.loads(line) for line in lines]
    prepared = Prepared(args.model, requests)
    candidates = len(prepared.expected[0])
    measured = [measure(args, prepared, arrangement) for arrangement in arrangements(args.threads)]
    best = max(measured, key=lambda arrangement: arrangement["requestsPerSecond"])
    figures = {"samplesPerSecond": best["requestsPerSecond"] * candidates, **best, "arrangements": measured}
    print(json.dumps({"work": "serve", "peer": args.peer, "threads": args.threads, **figures}))


if __name__ == "__main__":
    main()
