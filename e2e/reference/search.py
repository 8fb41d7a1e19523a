"""The search for the settings in README.md. It runs variations of a base setting, measures each on the validation cut
(never on the test), and prints one line per variation and model: the mean over the seeds.

    python search.py criteo FOLDER    'batch=256' 'batch=512' 'batch=512,sparse_lr=2e-3'
    python search.py movielens FOLDER 'dropout=0.3' 'dropout=0.3,epochs=10,features=user+item+genres'
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean

import torch

from data import MOVIELENS_FEATURES, without_valid
from reference import DEFAULTS, Settings, load, train

MODELS = {"criteo": ("dlrm", "deepfm", "dcnV2"), "movielens": ("deepfm",)}
SEEDS = {"criteo": (1, 2), "movielens": (1,)}


def parse(variation: str, base: Settings) -> tuple[Settings, str]:
    changes = dict(part.split("=", 1) for part in variation.split(",") if part)
    features = changes.pop("features", "+".join(MOVIELENS_FEATURES)).replace("+", ",")
    kinds = {field.name: type(getattr(base, field.name)) for field in fields(Settings)}
    values = {name: tuple(map(int, text.split("-"))) if kinds[name] is tuple else kinds[name](text) for name, text in changes.items()}
    return replace(base, **values), features


def main() -> None:
    torch.set_num_threads(1)
    name, folder, variations = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    datasets = {}
    for variation in variations:
        settings, features = parse(variation, DEFAULTS[name])
        if features not in datasets:
            datasets[features] = load(name, folder, features)
        data = datasets[features]
        for model in MODELS[name]:
            runs = [list(train(data, model, settings, seed, without_valid(data), data.valid)) for seed in SEEDS[name]]
            epochs = [(mean(run[e]["auc"] for run in runs), mean(run[e]["logLoss"] for run in runs)) for e in range(settings.epochs)]
            best = max(range(settings.epochs), key=lambda epoch: epochs[epoch][0])
            trail = " ".join(f"{area:.4f}" for area, _ in epochs)
            seconds = sum(result["seconds"] for run in runs for result in run)
            print(f"{variation:60} {model:7} best epoch {best + 1} auc {epochs[best][0]:.4f} logLoss {epochs[best][1]:.4f} | {trail} | {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
