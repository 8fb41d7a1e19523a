"""Predicts the rows of a CSV file with the module in e2e/python, for predict.rs.

Arguments: the folder of an export, the input, the output. Cells go to the module as the texts that the
file has.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "e2e" / "python"))
sys.dont_write_bytecode = True

from rectrain_predict import Model  # noqa: E402

export, source, target = sys.argv[1:]
with open(source, newline="", encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
columns = {name: [row[name] for row in rows] for name in rows[0]}
probabilities = Model(export).predict(columns)
with open(target, "w", encoding="utf-8") as file:
    file.write("probability\n")
    file.writelines(f"{probability:.9g}\n" for probability in probabilities)
