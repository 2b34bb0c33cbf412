"""Builds the one extension, cdist._core, from csrc/ with the C compiler alone.

Switches, from the environment:
    CC=clang                            another compiler
    CDIST_SANITIZE=address,undefined    (or thread) a sanitizer build
    CDIST_COVERAGE=1                    a build for gcov
    CDIST_WERROR=1                      warnings are errors (CI)
"""

import os
import platform
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
ROOMS = "base simd net shm store coll cuda backend group ddp sampler py".split()
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion"]

# One body, compiled once per instruction set; the choice is made when the library is loaded (csrc/simd/reduce.c).
SIMD_FLAGS = {
    "x86_64": {"reduce_avx2.c": ["-mavx2", "-mf16c"],
               "reduce_avx512.c": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"]},
    "aarch64": {},
}


class BuildExt(build_ext):
    """Compiles files in parallel and gives the SIMD files their instruction sets."""

    def build_extension(self, ext):
        flags = SIMD_FLAGS.get(platform.machine(), {})
        compile_one = self.compiler._compile

        def compile_with_flags(obj, src, ext_name, cc_args, extra, pp_opts):
            extra = extra + flags.get(os.path.basename(src), [])
            return compile_one(obj, src, ext_name, cc_args, extra, pp_opts)

        self.compiler._compile = compile_with_flags
        super().build_extension(ext)


def switches():
    compile_args = ["-std=c11", "-O2", "-g", "-ffp-contract=off", "-fvisibility=hidden", *WARNINGS]
    link_args = []
    if os.environ.get("CDIST_WERROR"):
        compile_args.append("-Werror")
    sanitize = os.environ.get("CDIST_SANITIZE")
    if sanitize:
        compile_args += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
        link_args += [f"-fsanitize={sanitize}"]
    if os.environ.get("CDIST_COVERAGE"):
        compile_args += ["--coverage", "-O0"]
        link_args += ["--coverage"]
    return compile_args, link_args


def extension():
    compile_args, link_args = switches()
    sources = sorted(str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / "csrc" / room).glob("*.c"))
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*/*.h"))
    return Extension(
        "cdist._core",
        sources=sources,
        depends=headers,
        include_dirs=["csrc", numpy.get_include()],
        define_macros=[("_GNU_SOURCE", "1"), ("NPY_NO_DEPRECATED_API", "NPY_1_23_API_VERSION"),
                       ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION")],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        libraries=["dl", "pthread", "m"],
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt})
