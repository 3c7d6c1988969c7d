"""The native code of holter and holter_kernels; everything else about the packages is in pyproject.toml.

`pip install -e .` and `pip install .` build it with the C compiler at hand; `python setup.py build_ext --inplace` rebuilds it alone.
Where there is no compiler the build goes on without it: holter_kernels says at first use that it takes the slow path, and a rank that
crashes in native code leaves what its sidecar copied last, and one that gets a SIGTERM ends at once.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

SOURCES = Path("kernels/holter_kernels/csrc")
FLAGS = ["-g0", "-std=gnu11", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]


def rank_extension(name: str, folder: str = "rank", **more: object) -> Extension:
    """One file of the rank's own native code, a module by its name."""
    return Extension(
        f"holter.{folder}._{name}",
        sources=[f"daemon/holter/{folder}/csrc/{name}.c"],
        extra_compile_args=["-O2", *FLAGS],
        py_limited_api=True,
        optional=True,
        **more,
    )


class WithDashboards(build_py):
    """The wheel has Grafana's dashboards as they are committed: to print them takes no package that generates them."""

    def run(self) -> None:
        """Copy them beside the code that generates them."""
        super().run()
        if not self.editable_mode:
            made = Path(self.build_lib, "holter", "exporters", "dashboards", "made")
            self.mkpath(str(made))
            for path in sorted(Path("grafana/dashboards").glob("*.json")):
                self.copy_file(str(path), str(made / path.name))


setup(
    cmdclass={"build_py": WithDashboards},
    ext_modules=[
        Extension(
            "holter_kernels._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in [*SOURCES.glob("*.h"), *SOURCES.glob("*.inc")]),
            extra_compile_args=["-O3", *FLAGS],
            extra_link_args=["-pthread"],
            libraries=["m"],
            py_limited_api=True,
            optional=True,
        ),
        *(rank_extension(name) for name in ("attempt", "crash_notice", "termination", "living", "samples")),
        rank_extension("latch", "page"),
        rank_extension(
            "rows",
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            include_dirs=[str(SOURCES)],
            libraries=["m"],
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
