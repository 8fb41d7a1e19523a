"""An independent PyTorch reference for Rectrain's quality claims. It trains one model on Criteo's or MovieLens' rows
and prints the test metrics, one line per seed. It shares no code and no numbers with the Rust system.

    python reference.py --data criteo --model dlrm --seeds 1,2,3 --json
    python reference.py --data movielens --model deepfm --seeds 1,2,3 --json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor, nn

from data import MOVIELENS_FEATURES, Dataset, Rows, criteo, movielens, without_valid
from models import MODELS, Model, RowWiseAdagrad

EVALUATION_BATCH = 4096
DENSE_OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad")
SPARSE_OPTIMIZERS = ("adam", "adagrad", "rowwise-adagrad", "sgd")


@dataclass(frozen=True)
class Settings:
    """Everything besides data, model and seed that determines a result. `shuffle_window` is the number of rows in the
    shuffle buffer (0: file order). `weight_decay` is AdamW's, on dense parameters only."""

    batch: int = 128
    epochs: int = 1
    shuffle_window: int = 0
    dim: int = 16
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.0
    init: str = "normal"
    init_scale: float = 0.01
    dense_optimizer: str = "adam"
    dense_lr: float = 1e-3
    weight_decay: float = 0.0
    sparse_optimizer: str = "adam"
    sparse_lr: float = 1e-3


DEFAULTS = {
    "criteo": Settings(),
    "movielens": Settings(batch=256, epochs=8, shuffle_window=100_000, dim=32, dropout=0.5, init_scale=0.05),
}


# --- metrics ---------------------------------------------------------------------------------------------------------


def auc(score: Tensor, label: Tensor) -> float:
    """Area under the ROC curve: the probability that a positive outscores a negative. A tie counts one half."""
    _, group, count = torch.unique(score, return_inverse=True, return_counts=True)
    last_rank = count.cumsum(0).double()
    rank = (last_rank - (count.double() - 1.0) / 2.0)[group]
    positives, negatives = float(label.sum()), float((1.0 - label).sum())
    if positives == 0.0 or negatives == 0.0:
        raise ValueError("AUC needs rows of both labels")
    return (float(rank[label == 1.0].sum()) - positives * (positives + 1.0) / 2.0) / (positives * negatives)


def metrics(logit: Tensor, label: Tensor) -> dict[str, float]:
    """`normalizedEntropy`: log loss divided by the log loss of always predicting the mean label. `calibration`:
    Σ prediction / Σ label."""
    logit, label = logit.double(), label.double()
    loss = float(nn.functional.binary_cross_entropy_with_logits(logit, label))
    mean = float(label.mean())
    entropy = -(mean * math.log(mean) + (1.0 - mean) * math.log(1.0 - mean))
    return {
        "auc": auc(logit, label),
        "logLoss": loss,
        "normalizedEntropy": loss / entropy,
        "calibration": float(logit.sigmoid().sum() / label.sum()),
    }


# --- training --------------------------------------------------------------------------------------------------------


def dense_optimizer(settings: Settings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    match settings.dense_optimizer:
        case "adam":
            return torch.optim.Adam(parameters, settings.dense_lr)
        case "adamw":
            return torch.optim.AdamW(parameters, settings.dense_lr, weight_decay=settings.weight_decay)
        case "sgd":
            return torch.optim.SGD(parameters, settings.dense_lr)
        case _:
            return torch.optim.Adagrad(parameters, settings.dense_lr)


def sparse_optimizer(settings: Settings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Touches only rows in the batch. `adam` is lazy: an absent row's moments do not decay. Its bias correction counts
    all steps of the table."""
    match settings.sparse_optimizer:
        case "adam":
            return torch.optim.SparseAdam(parameters, settings.sparse_lr)
        case "adagrad":
            return torch.optim.Adagrad(parameters, settings.sparse_lr)
        case "rowwise-adagrad":
            return RowWiseAdagrad(parameters, settings.sparse_lr)
        case _:
            return torch.optim.SGD(parameters, settings.sparse_lr)


def window_shuffle(rows: int, window: int, generator: torch.Generator) -> Tensor:
    """The order of `rows` rows after a shuffle buffer of `window` rows. Each step emits a random row of the buffer and
    replaces it by the next row. A window of at least `rows` shuffles all rows."""
    if window <= 1:
        return torch.arange(rows)
    if window >= rows:
        return torch.randperm(rows, generator=generator)
    buffer = list(range(window))
    draws = torch.rand(rows, generator=generator).tolist()
    order = []
    for step in range(rows):
        place = int(draws[step] * len(buffer))
        order.append(buffer[place])
        following = window + step
        if following < rows:
            buffer[place] = following
        else:
            buffer[place] = buffer[-1]
            buffer.pop()
    return torch.tensor(order)


def batches(rows: Rows, settings: Settings, generator: torch.Generator) -> Iterator[Rows]:
    order = window_shuffle(len(rows), settings.shuffle_window, generator)
    for index in order.split(settings.batch):
        yield rows.take(index)


@torch.no_grad()
def predict(model: Model, rows: Rows) -> Tensor:
    model.eval()
    parts = [model(ids, dense) for ids, dense in zip(rows.ids.split(EVALUATION_BATCH), rows.dense.split(EVALUATION_BATCH))]
    model.train()
    return torch.cat(parts)


def train(data: Dataset, name: str, settings: Settings, seed: int, train_rows: Rows, test: Rows) -> Iterator[dict]:
    """Yields the metrics on `test` after every epoch."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Model(
        name,
        data.table_rows,
        data.field_widths,
        data.dense_width,
        dim=settings.dim,
        hidden=settings.hidden,
        dropout=settings.dropout,
        init=settings.init,
        init_scale=settings.init_scale,
    )
    optimizers = [dense_optimizer(settings, model.dense_parameters()), sparse_optimizer(settings, model.sparse_parameters())]
    for epoch in range(1, settings.epochs + 1):
        start, total = time.perf_counter(), 0.0
        for batch in batches(train_rows, settings, generator):
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch.ids, batch.dense), batch.label)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            total += float(loss.detach()) * len(batch)
        seconds = time.perf_counter() - start
        yield {"epoch": epoch, "trainLoss": total / len(train_rows)} | metrics(predict(model, test), test.label) | {"seconds": seconds}


# --- command line ----------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=sorted(DEFAULTS), required=True)
    parser.add_argument("--path", type=Path, required=True, help="the data set's folder")
    parser.add_argument("--model", choices=MODELS, default="deepfm")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--on", choices=("test", "valid"), default="test", help="valid: hold out the end of the training rows, and measure there")
    parser.add_argument("--features", default=",".join(MOVIELENS_FEATURES), help="MovieLens' sparse features, comma-separated")
    parser.add_argument("--every-epoch", action="store_true", help="a line per epoch instead of one after the last")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--init", choices=("normal", "uniform"))
    parser.add_argument("--dense-optimizer", choices=DENSE_OPTIMIZERS)
    parser.add_argument("--sparse-optimizer", choices=SPARSE_OPTIMIZERS)
    parser.add_argument("--hidden", type=lambda text: tuple(int(size) for size in text.split(",")), help="e.g. 256,128")
    for name, kind in (("batch", int), ("epochs", int), ("shuffle-window", int), ("dim", int)):
        parser.add_argument(f"--{name}", type=kind)
    for name in ("dropout", "init-scale", "dense-lr", "sparse-lr", "weight-decay"):
        parser.add_argument(f"--{name}", type=float)
    return parser.parse_args()


def settings_of(arguments: argparse.Namespace) -> Settings:
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    return replace(DEFAULTS[arguments.data], **{name: value for name, value in given.items() if value is not None})


def load(name: str, path: Path, features: str) -> Dataset:
    """The data set `name` from the folder `path`."""
    if name == "criteo":
        return criteo(path)
    return movielens(path, features.split(","))


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    settings = settings_of(arguments)
    data = load(arguments.data, arguments.path, arguments.features)
    train_rows, test = (data.train, data.test) if arguments.on == "test" else (without_valid(data), data.valid)
    for seed in (int(text) for text in arguments.seeds.split(",")):
        for result in train(data, arguments.model, settings, seed, train_rows, test):
            if not (arguments.every_epoch or result["epoch"] == settings.epochs):
                continue
            line = {"data": arguments.data, "model": arguments.model, "seed": seed, "on": arguments.on} | result
            if arguments.json:
                print(json.dumps(line | {"settings": asdict(settings)}), flush=True)
            else:
                print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()), flush=True)


if __name__ == "__main__":
    main()
