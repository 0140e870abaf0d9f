# Included by CMake at llama-cpp-python's project() (CMAKE_PROJECT_<name>_INCLUDE).
#
# That project forces LLAMA_BUILD_COMMON, llama.cpp's helpers for its own command line tools, on in the cache. They are
# half of what is left to compile, and nothing of ours links against them. A normal variable goes before a cached one.
set(LLAMA_BUILD_COMMON OFF)
