"""Trains the DLRM of `epoch.yaml` on the rows of a file for one epoch, and tests it, with PyTorch and TorchRec. Prints
one line of JSON with the test AUC and the seconds of training and of the test.

    python epoch.py --peer torchrec --train train.parquet --test test.parquet

The peers, each also with `-bf16` (autocast):

    torch               nn.EmbeddingBag with sparse gradients, batches by pyarrow on the same thread
    torchrec            TorchRec's fused tables, batches by polars, read ahead on a thread
    torchrec-workers    the same tables, batches by pyarrow in worker processes of a DataLoader, as TorchEasyRec does
"""

import argparse
import json
import os
import time

PEERS = ["torch", "torchrec", "torchrec-workers"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS + [f"{peer}-bf16" for peer in PEERS], required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def reader(peer, threads):
    """The function that reads a file in batches of arrays or tensors."""
    from epoch_data import ahead, arrow_batches, polars_batches

    if peer == "torch":
        return arrow_batches
    if peer == "torchrec":
        return lambda path: ahead(polars_batches(path))
    return lambda path: worker_batches(path, threads)


def worker_batches(path, workers):
    import numpy
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    from epoch_data import arrow_batches

    class Rows(IterableDataset):
        def __iter__(self):
            worker = get_worker_info()
            for batch in arrow_batches(path, worker.id, worker.num_workers):
                # A part of an array would be sent with the whole array.
                yield tuple(torch.from_numpy(numpy.ascontiguousarray(part)) for part in batch)

    # A text file cannot be divided, so one process reads it.
    workers = workers if path.endswith(".parquet") else 1
    return DataLoader(Rows(), batch_size=None, num_workers=workers, prefetch_factor=4)


def main():
    args = arguments()
    # polars reads this when it is imported.
    os.environ["POLARS_MAX_THREADS"] = str(args.threads)
    peer, bf16 = args.peer.removesuffix("-bf16"), args.peer.endswith("-bf16")

    import torch
    from torch import nn

    from epoch_data import area_under_curve
    from peers import Bags, Dlrm, Fused

    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    batches = reader(peer, args.threads)
    model, tables = Dlrm(), Bags() if peer == "torch" else Fused()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loss_of = nn.BCEWithLogitsLoss()

    def logits_of(dense, ids):
        embeddings = tables(torch.as_tensor(ids))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(embeddings, torch.as_tensor(dense)).float()

    begin, rows = time.perf_counter(), 0
    for labels, dense, ids in batches(args.train):
        loss_of(logits_of(dense, ids), torch.as_tensor(labels)[:, None]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tables.step()
        rows += len(labels)
    trained = time.perf_counter()
    scores, truth = [], []
    with torch.no_grad():
        for labels, dense, ids in batches(args.test):
            scores.append(logits_of(dense, ids)[:, 0])
            truth.append(torch.as_tensor(labels))
    auc = area_under_curve(torch.cat(scores).numpy(), torch.cat(truth).numpy())
    tested = time.perf_counter()
    figures = {"auc": auc, "rows": rows, "trainSeconds": trained - begin, "testSeconds": tested - trained}
    print(json.dumps({"peer": args.peer, "threads": args.threads, **figures}))


if __name__ == "__main__":
    main()
