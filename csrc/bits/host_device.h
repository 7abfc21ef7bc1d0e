// Marks functions that nvcc compiles for host and device alike. Plain C++17 otherwise.
#pragma once

#if defined(__CUDACC__)
#define PULSE_HD __host__ __device__ __forceinline__
#else
#define PULSE_HD inline
#endif
