#!/usr/bin/env python3
"""Makes a wheel with the `rectrain` command: `pip install` puts the program on the PATH.

usage: wheel.py PROGRAM VERSION FOLDER

Only the standard library is needed. The wheel has no Python code. Its tag says which systems can run
the program: the newest glibc that the program asks for, or any Linux if it is static.
"""

import base64
import hashlib
import os
import re
import subprocess
import sys
import time
import zipfile

METADATA = """\
Metadata-Version: 2.1
Name: rectrain
Version: {version}
Summary: Trains recommender models whose embedding tables are too large for one machine
License: Apache-2.0
Requires-Python: >=3.8
Classifier: Operating System :: POSIX :: Linux
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Description-Content-Type: text/markdown

{readme}"""

WHEEL = """\
Wheel-Version: 1.0
Generator: rectrain
Root-Is-Purelib: false
{tags}"""

MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}


def read_elf(program, *options):
    return subprocess.run(["readelf", *options, program], check=True, capture_output=True, text=True).stdout


def platforms(program):
    """The platform tags of the program (PEP 600, PEP 656)."""
    found = re.search(r"Machine:\s+(.*)", read_elf(program, "--wide", "-h")).group(1).strip()
    machine = MACHINES.get(found)
    if machine is None:
        sys.exit(f"{program} is for {found}: expected one of {', '.join(MACHINES)}")
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", read_elf(program, "--wide", "--dyn-syms"))
    if not versions:
        # A static program runs with any C library.
        return [f"manylinux_2_17_{machine}", f"manylinux2014_{machine}", f"musllinux_1_1_{machine}"]
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    return [f"manylinux_{major}_{minor}_{machine}"]


def entry(name, executable=False):
    # One time for all files, so that equal programs make equal wheels.
    moment = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "315532800")), 315532800))
    info = zipfile.ZipInfo(name, moment[:6])
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = (0o100755 if executable else 0o100644) << 16
    return info


def main(program, version, folder):
    tags = platforms(program)
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "../../README.md"), encoding="utf-8") as file:
        readme = file.read()
    with open(os.path.join(here, "../../LICENSE"), "rb") as file:
        licence = file.read()
    with open(program, "rb") as file:
        binary = file.read()
    info = f"rectrain-{version}.dist-info"
    files = [
        (f"rectrain-{version}.data/scripts/rectrain", binary),
        (f"{info}/licenses/LICENSE", licence),
        (f"{info}/METADATA", METADATA.format(version=version, readme=readme).encode()),
        (f"{info}/WHEEL", WHEEL.format(tags="".join(f"Tag: py3-none-{tag}\n" for tag in tags)).encode()),
    ]
    record = []
    path = os.path.join(folder, f"rectrain-{version}-py3-none-{'.'.join(tags)}.whl")
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
            wheel.writestr(entry(name, executable=data is binary), data)
        record.append(f"{info}/RECORD,,\n")
        wheel.writestr(entry(f"{info}/RECORD"), "".join(record))
    print(path)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
