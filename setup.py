"""Builds the one extension, cdist._core, from csrc/ with the C compiler alone.

Switches, from the environment:
    CC=clang                            another compiler
    CDIST_SANITIZE=address,undefined    (or thread) a sanitizer build
    CDIST_COVERAGE=1                    a build for gcov
    CDIST_WERROR=1                      warnings are errors (CI)
    CDIST_NVCC=/path/nvcc               compiler of the GPU kernels; empty: none
                                        (default: the one in PATH or /usr/local/cuda)
"""

import atexit
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
ROOMS = ["base", "simd", "net", "shm", "store", "coll", "cuda", "backend", "group", "ddp", "sampler", "py"]
# Where everything is made: build/, or where the source may only be read a temporary folder.
PLACE = ROOT / "build"
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion"]

# One body, compiled once per instruction set; the choice is made when the library is loaded
# (csrc/simd/reduce.c).
SIMD_FLAGS = {
    "x86_64": {
        "reduce_avx2.c": ["-mavx2", "-mf16c"],
        "reduce_avx512.c": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"],
    },
    "aarch64": {},
}


# Machine code for Ampere and Hopper, and PTX, which later GPUs compile for themselves.
NVCC_TARGETS = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
]


def compile_kernels(nvcc, kernels, fatbin, is_named):
    """Return nvcc's image of the kernels; b"", with a warning, where it fails and nobody has named it."""
    flags = ["-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-fatbin", *NVCC_TARGETS]
    try:
        subprocess.run([nvcc, *flags, str(kernels), "-o", str(fatbin)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.strerror if isinstance(error, OSError) else f"exit status {error.returncode}"
        if is_named:
            raise SystemExit(f"CDIST_NVCC={nvcc} does not compile the GPU kernels: {why}") from None
        print(
            f"warning: {nvcc} does not compile the GPU kernels ({why}): NVRTC will, at first use",
            file=sys.stderr,
        )
        return b""
    return fatbin.read_bytes()


def embed_kernels(folder):
    """Write the GPU kernels as a C file: nvcc's image where there is nvcc; always their source, for NVRTC."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels, params = ROOT / "csrc/cuda/kernels.cu", ROOT / "csrc/cuda/kernel_params.h"
    made = folder / "kernels_image.c"
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc") or ""
    nvcc = os.environ.get("CDIST_NVCC", found)
    stamp = f"/* by {nvcc or 'no nvcc'} */\n"
    newest = max(path.stat().st_mtime for path in (kernels, params, ROOT / "setup.py"))
    if made.exists() and made.stat().st_mtime > newest and made.read_text().startswith(stamp):
        return made
    image = (
        compile_kernels(nvcc, kernels, folder / "kernels.fatbin", "CDIST_NVCC" in os.environ) if nvcc else b""
    )
    source = kernels.read_text().replace('#include "cuda/kernel_params.h"', params.read_text())
    image_bytes, source_bytes = (
        ",".join(map(str, b)) for b in (image or b"\0", source.encode("ascii", "replace"))
    )
    made.write_text(
        f'{stamp}#include "cuda/kernels.h"\n'
        f"const unsigned char cd_kernels_image[] CD_ALIGNED(64) = {{{image_bytes}}};\n"
        f"const char cd_kernels_source[] = {{{source_bytes},0}};\n"
    )
    return made


class BuildExt(build_ext):
    """Compiles files in parallel, gives the SIMD files their instruction sets, and adds the GPU kernels."""

    def build_extension(self, ext):
        """Build one extension, with the kernels among its sources."""
        image = embed_kernels(PLACE / "kernels")
        is_inside = image.is_relative_to(ROOT)
        ext.sources = [*ext.sources, str(image.relative_to(ROOT) if is_inside else image)]
        flags = SIMD_FLAGS.get(platform.machine(), {})
        compile_one = self.compiler._compile

        def compile_with_flags(obj, src, ext_name, cc_args, extra, pp_opts):
            extra = extra + flags.get(os.path.basename(src), [])
            return compile_one(obj, src, ext_name, cc_args, extra, pp_opts)

        link = self.compiler.link_shared_object
        with ThreadPoolExecutor(self.parallel or len(os.sched_getaffinity(0))) as pool:
            jobs = []

            def link_when_compiled(*args, **kwargs):
                for job in jobs:
                    job.result()
                link(*args, **kwargs)

            self.compiler._compile = lambda *args: jobs.append(pool.submit(compile_with_flags, *args))
            self.compiler.link_shared_object = link_when_compiled
            super().build_extension(ext)


def switches():
    """Return the arguments of compiler and linker that the environment asks for."""
    compile_args = ["-std=c11", "-O2", "-g", "-ffp-contract=off", "-fvisibility=hidden", *WARNINGS]
    link_args = []
    if os.environ.get("CDIST_WERROR"):
        compile_args.append("-Werror")
    sanitize = os.environ.get("CDIST_SANITIZE")
    if sanitize:
        compile_args += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
        link_args += [f"-fsanitize={sanitize}"]
    if os.environ.get("CDIST_COVERAGE"):
        compile_args += ["--coverage", "-O1"]  # below that the headers of the vector instructions warn
        link_args += ["--coverage"]
    return compile_args, link_args


def extension():
    """Return the one extension, of all C files in csrc/."""
    compile_args, link_args = switches()
    files = (path for room in ROOMS for path in (ROOT / "csrc" / room).glob("*.c"))
    sources = sorted(str(path.relative_to(ROOT)) for path in files)
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*/*.h"))
    return Extension(
        "cdist._core",
        sources=sources,
        depends=headers,
        include_dirs=["csrc", numpy.get_include()],
        define_macros=[
            ("_GNU_SOURCE", "1"),
            ("NPY_NO_DEPRECATED_API", "NPY_1_23_API_VERSION"),
            ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),
        ],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        libraries=["dl", "pthread", "m"],
    )


def elsewhere():
    """Return the options by which nothing is written into a source that may only be read."""
    global PLACE
    if os.access(ROOT, os.W_OK):
        return {}
    PLACE = Path(tempfile.mkdtemp(prefix="cdist-build-"))
    atexit.register(shutil.rmtree, PLACE, ignore_errors=True)
    return {"build": {"build_base": str(PLACE)}, "egg_info": {"egg_base": str(PLACE)}}


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt}, options=elsewhere())
