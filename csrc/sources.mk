# The sources of the C core, for make; setup.py takes the same folders. Flags that one file needs stand in source_flags,
# as in setup.py's SIMD_FLAGS.
ROOMS := base simd net shm store coll cuda backend group ddp sampler
CORE_SOURCES := $(patsubst $(ROOT)/%,%,$(sort $(foreach room,$(ROOMS),$(wildcard $(ROOT)/csrc/$(room)/*.c))))
ifneq ($(filter x86_64%,$(shell $(CC) -dumpmachine)),)
FLAGS_reduce_avx2 := -mavx2 -mf16c
FLAGS_reduce_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c
endif
source_flags = $(FLAGS_$(notdir $1))
