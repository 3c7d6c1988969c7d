"""The native code of holter_kernels; everything else about the package is in pyproject.toml.

`pip install -e .` and `pip install .` build it with the C compiler at hand; `python setup.py build_ext --inplace` rebuilds it alone.
Where there is no compiler the build goes on without it, and holter_kernels says at first use that it takes the slow path.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("kernels/holter_kernels/csrc")

setup(
    ext_modules=[
        Extension(
            "holter_kernels._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in [*SOURCES.glob("*.h"), *SOURCES.glob("*.inc")]),
            extra_compile_args=["-O3", "-g0", "-std=gnu11", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
