"""Our words for the binary interfaces of the CUDA driver and of NCCL, compiled beside the real headers."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLKITS = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]

DRIVER_VALUES = """
CUDA_SUCCESS CD_CU_SUCCESS / CUDA_ERROR_INVALID_VALUE CD_CU_INVALID_VALUE
CUDA_ERROR_OUT_OF_MEMORY CD_CU_OUT_OF_MEMORY
CUDA_ERROR_DEINITIALIZED CD_CU_DEINITIALIZED / CUDA_ERROR_NO_DEVICE CD_CU_NO_DEVICE
CUDA_ERROR_NOT_READY CD_CU_NOT_READY
CUDA_ERROR_NOT_SUPPORTED CD_CU_NOT_SUPPORTED / CU_STREAM_NON_BLOCKING CD_CU_STREAM_NON_BLOCKING
CU_EVENT_DISABLE_TIMING CD_CU_EVENT_DISABLE_TIMING / CU_STREAM_CAPTURE_STATUS_NONE CD_CU_CAPTURE_NONE
CU_STREAM_CAPTURE_MODE_RELAXED CD_CU_CAPTURE_MODE_RELAXED / CU_MEMORYTYPE_DEVICE CD_CU_MEMORY_DEVICE
CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL CD_CU_POINTER_DEVICE_ORDINAL
CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT CD_CU_DEVICE_MULTIPROCESSORS
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR CD_CU_DEVICE_MAJOR
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR CD_CU_DEVICE_MINOR
CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED CD_CU_DEVICE_MEMORY_POOLS
sizeof(CUresult) sizeof(cd_cu_result) / sizeof(CUdevice) sizeof(cd_cu_device)
sizeof(CUdeviceptr) sizeof(cd_cu_address)
sizeof(CUuuid) sizeof(cd_cu_uuid) / sizeof(CUDA_MEMCPY2D) sizeof(cd_cu_copy_2d)
sizeof(CUstream) sizeof(cd_cu_stream)
"""
COPY_FIELDS = [
    "srcXInBytes",
    "from_x_bytes",
    "srcY",
    "from_y",
    "srcMemoryType",
    "from_type",
    "srcHost",
    "from_host",
    "srcDevice",
    "from_device",
    "srcArray",
    "from_array",
    "srcPitch",
    "from_pitch",
    "dstXInBytes",
    "to_x_bytes",
    "dstY",
    "to_y",
    "dstMemoryType",
    "to_type",
    "dstHost",
    "to_host",
    "dstDevice",
    "to_device",
    "dstArray",
    "to_array",
    "dstPitch",
    "to_pitch",
    "WidthInBytes",
    "width_bytes",
    "Height",
    "height",
]

NCCL_VALUES = """
ncclSuccess CD_NCCL_SUCCESS / ncclInvalidArgument CD_NCCL_INVALID_ARGUMENT
ncclRemoteError CD_NCCL_REMOTE_ERROR
ncclInProgress CD_NCCL_IN_PROGRESS / ncclInt8 CD_NCCL_INT8 / ncclUint8 CD_NCCL_UINT8 / ncclInt32 CD_NCCL_INT32
ncclUint32 CD_NCCL_UINT32 / ncclInt64 CD_NCCL_INT64 / ncclUint64 CD_NCCL_UINT64 / ncclFloat16 CD_NCCL_FLOAT16
ncclFloat32 CD_NCCL_FLOAT32 / ncclFloat64 CD_NCCL_FLOAT64 / ncclBfloat16 CD_NCCL_BFLOAT16
ncclFloat8e4m3 CD_NCCL_FLOAT8_E4M3 / ncclFloat8e5m2 CD_NCCL_FLOAT8_E5M2 / ncclSum CD_NCCL_SUM
ncclProd CD_NCCL_PROD
ncclMax CD_NCCL_MAX / ncclMin CD_NCCL_MIN / ncclAvg CD_NCCL_AVG / ncclScalarHostImmediate CD_NCCL_SCALAR_HOST
NCCL_SHRINK_DEFAULT CD_NCCL_SHRINK_DEFAULT
NCCL_API_MAGIC CD_NCCL_MAGIC / NCCL_CONFIG_UNDEF_INT CD_NCCL_UNSET
NCCL_VERSION(2,18,0) CD_NCCL_LEAST / sizeof(ncclUniqueId) sizeof(cd_nccl_id)
sizeof(ncclResult_t) sizeof(cd_nccl_result)
sizeof(ncclDataType_t) sizeof(cd_nccl_type) / sizeof(ncclRedOp_t) sizeof(cd_nccl_redop)
sizeof(ncclComm_t) sizeof(cd_nccl_comm)
"""
CONFIG_FIELDS = [
    "size",
    "size",
    "magic",
    "magic",
    "version",
    "version",
    "blocking",
    "blocking",
    "cgaClusterSize",
    "cga_cluster",
    "minCTAs",
    "ctas_least",
    "maxCTAs",
    "ctas_most",
    "netName",
    "net_name",
    "splitShare",
    "split_share",
    "trafficClass",
    "traffic_class",
]


def toolkit_include():
    for home in TOOLKITS:
        if Path(home, "include", "cuda.h").exists():
            return Path(home, "include")
    return None


def nccl_include():
    """Folder of nccl.h: of the wheel, or of the system."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    folders = [Path(place, "include") for place in (spec.submodule_search_locations if spec else [])]
    folders += [Path(os.environ["NCCL_HOME"], "include")] if "NCCL_HOME" in os.environ else []
    for folder in [*folders, Path("/usr/include"), Path("/usr/local/include")]:
        if (folder / "nccl.h").exists():
            return folder
    return None


def pairs(text):
    words = text.replace("/", " ").split()
    return list(zip(words[::2], words[1::2], strict=True))


def symbols(header):
    """The symbols of the rows X(field, symbol, …) of a header's tables."""
    return re.findall(r"X\(\w+, ((?:cu|nccl)\w+),", (ROOT / "csrc" / "cuda" / header).read_text())


def check(folder, includes, headers, values, structs, names):
    """Compiles assertions that each value equals ours, runs a program that compares the names of symbols."""
    asserts = [
        f'_Static_assert((long long)({theirs}) == (long long)({ours}), "{ours}");' for theirs, ours in values
    ]
    for real, ours, fields in structs:
        asserts += [
            f'_Static_assert(offsetof({real}, {a}) == offsetof({ours}, {b}), "{b}");'
            f'_Static_assert(sizeof((({real} *)0)->{a}) == sizeof((({ours} *)0)->{b}), "size of {b}");'
            for a, b in zip(fields[::2], fields[1::2], strict=True)
        ]
    rows = ",".join(f'{{TEXT({re.sub("_v[0-9]$", "", name)}), "{name}"}}' for name in names)
    used = "\n".join(f"(void)&{re.sub('_v[0-9]$', '', name)};" for name in names)
    source = folder / "abi.c"
    source.write_text(
        "\n".join(f"#include {header}" for header in headers)
        + "\n#include <stddef.h>\n#include <string.h>\n#include <stdio.h>\n"
        + "#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\n"
        + "\n".join(asserts)
        + "\nvoid declared(void);\nint main(void) { "
        + f"static const char *const rows[][2] = {{{rows}}}; int wrong = 0;\n"
        + "for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) if (strcmp(rows[i][0], rows[i][1]) != 0)"
        + ' { printf("%s is %s\\n", rows[i][1], rows[i][0]); wrong = 1; }\nreturn wrong; }\n'
    )
    declared = folder / "declared.c"
    declared.write_text(
        "\n".join(f"#include {h}" for h in headers)
        + f"\nvoid declared(void);\nvoid declared(void) {{ {used} }}\n"
    )
    flags = [f"-I{path}" for path in [ROOT / "csrc", *includes]]
    cc = os.environ.get("CC", "cc")
    subprocess.run(
        [cc, "-std=c11", "-Wno-deprecated-declarations", *flags, source, "-o", folder / "abi"],
        check=True,
        timeout=60,
    )
    subprocess.run(
        [cc, "-std=c11", *flags, "-c", declared, "-o", folder / "declared.o"], check=True, timeout=60
    )
    done = subprocess.run([folder / "abi"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stdout


def test_driver(tmp_path):
    include = toolkit_include()
    if not include:
        pytest.skip("no CUDA toolkit here: cuda.h is not in /usr/local/cuda nor CUDA_HOME")
    names = symbols("driver_abi.h")
    assert len(names) > 30
    copy = [("CUDA_MEMCPY2D", "cd_cu_copy_2d", COPY_FIELDS)]
    check(tmp_path, [include], ["<cuda.h>", '"cuda/driver_abi.h"'], pairs(DRIVER_VALUES), copy, names)


def test_nccl(tmp_path):
    include, toolkit = nccl_include(), toolkit_include()
    if not include or not toolkit:
        pytest.skip(
            "no nccl.h here (pip install nvidia-nccl-cu13==2.30.7), or no CUDA toolkit, which it includes"
        )
    names = symbols("nccl_abi.h")
    assert len(names) > 20
    header = (include / "nccl.h").read_text()
    fields = CONFIG_FIELDS if "trafficClass" in header else CONFIG_FIELDS[:-2]
    config = [("ncclConfig_t", "cd_nccl_config", fields)]
    newer = ("ncclFloat8e4m3", "ncclFloat8e5m2", "NCCL_API_MAGIC")  # not in the header of every release
    values = [pair for pair in pairs(NCCL_VALUES) if pair[0] not in newer or pair[0] in header]
    if "NCCL_API_MAGIC" not in header:
        assert "0xcafebeef" in header  # the number itself, in NCCL_CONFIG_INITIALIZER
    check(tmp_path, [include, toolkit], ["<nccl.h>", '"cuda/nccl_abi.h"'], values, config, names)


def test_kernels_compile(tmp_path):
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("no nvcc here: the kernels are compiled by NVRTC at first use")
    command = [nvcc, "-std=c++17", f"-I{ROOT / 'csrc'}", "-cubin", "-arch=sm_90", "-Werror", "all-warnings"]
    subprocess.run(
        [*command, ROOT / "csrc/cuda/kernels.cu", "-o", tmp_path / "kernels.cubin"], check=True, timeout=120
    )
