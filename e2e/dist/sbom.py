#!/usr/bin/env python3
"""Makes the bill of materials of the programs, as CycloneDX 1.5: every crate that is linked.

usage: cargo tree -p rectrain -e normal --prefix none --format '{p}|{l}' | sbom.py VERSION > FILE

Macros, and dependencies of tests and of build scripts, are left out: nothing of them is in a program.
"""

import json
import re
import sys


def component(line):
    """The crate of a line such as `ahash v0.8.12|MIT OR Apache-2.0`; None for other lines."""
    package, _, licence = line.strip().removesuffix(" (*)").partition("|")
    found = re.match(r"(\S+) v(\S+)( \(.*\))?$", package)
    if found is None or "(proc-macro)" in package:
        return None
    name, version, place = found.groups()
    crate = {"type": "library", "name": name, "version": version, "bom-ref": f"{name}@{version}"}
    if place is None:
        crate["purl"] = f"pkg:cargo/{name}@{version}"
    if licence:
        crate["licenses"] = [{"expression": licence.replace("/", " OR ")}]
    return crate


def main(version):
    crates = {crate["bom-ref"]: crate for crate in map(component, sys.stdin) if crate}
    if not crates:
        sys.exit("no crate was read")
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "rectrain", "version": version}},
        "components": [crates[name] for name in sorted(crates)],
    }
    json.dump(bill, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
