"""`python -m tests.fuzz TARGET --seconds 60`: bytes that reach code which no other input has reached, by atheris. What it finds is kept beside the seeds.

An input that raises, takes more than ten seconds or a gigabyte ends it with a number that is not 0, and lies in `tests/fuzz/kept/TARGET` as `crash-…`,
`timeout-…`, `oom-…`: the quick tests run it from then on.
"""

import argparse
import importlib
import pkgutil
import sys
import tempfile
from pathlib import Path


def import_all(*packages: str) -> None:
    """Commands import what they need when they are called; only what is imported now is seen by the fuzzer."""
    for package in packages:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def main() -> None:
    """Until the time is over or something is found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help="add what reached something new to the kept seeds")
    args = parser.parse_args()
    import atheris  # noqa: PLC0415 - not everywhere to be had

    with atheris.instrument_imports(include=["holter"]):
        from tests.fuzz.targets import KEPT, TARGETS, mutate_journal  # noqa: PLC0415

        import_all("holter.cli", "holter.offline", "holter.halting", "holter.flight", "holter.diagnosis")
        if args.target == "checkpoints":
            import_all("holter.frameworks.saving")

    target, kept = TARGETS[args.target], KEPT / args.target
    kept.mkdir(parents=True, exist_ok=True)
    begun = Path(tempfile.mkdtemp(prefix="holter-seeds-"))
    for number, seed in enumerate(target.seeds()):
        (begun / f"seed-{number}").write_bytes(seed)
    folders = (
        [str(kept), str(begun)] if args.keep else [tempfile.mkdtemp(prefix="holter-found-"), str(kept), str(begun)]
    )
    limits = [
        f"-max_total_time={args.seconds}",
        "-rss_limit_mb=1000",
        "-malloc_limit_mb=1000",
        "-timeout=10",
        "-max_len=4096",
    ]
    words = [sys.argv[0], *limits, f"-artifact_prefix={kept}/", "-print_final_stats=1", *folders]
    more = {}
    if args.target == "journal":
        more["custom_mutator"] = lambda data, size, seed: mutate_journal(data, size, seed, atheris.Mutate)
    atheris.Setup(words, target.call, **more)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
