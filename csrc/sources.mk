# The sources of the C core, for make; setup.py takes the same folders. Flags that one file needs stand in source_flags.
ROOMS := base simd net shm store coll cuda backend group ddp sampler
CORE_SOURCES := $(patsubst $(ROOT)/%,%,$(sort $(foreach room,$(ROOMS),$(wildcard $(ROOT)/csrc/$(room)/*.c))))
source_flags =
