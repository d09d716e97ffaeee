# Sets TENSORRT_INCLUDE_DIR and CUDA_INCLUDE_DIR. Only headers are needed: nothing of TensorRT or CUDA is linked.

# -DTENSORRT_INCLUDE_DIR may name a checkout of github.com/NVIDIA/TensorRT or its include folder; TensorRT_ROOT an unpacked SDK.
if(TENSORRT_INCLUDE_DIR AND EXISTS ${TENSORRT_INCLUDE_DIR}/include/NvInferRuntime.h)
  set(TENSORRT_INCLUDE_DIR ${TENSORRT_INCLUDE_DIR}/include CACHE PATH "Folder of NvInferRuntime.h" FORCE)
endif()
find_path(TENSORRT_INCLUDE_DIR NvInferRuntime.h
  HINTS ${TensorRT_ROOT} ENV TensorRT_ROOT ENV TENSORRT_INCLUDE_DIR
  PATH_SUFFIXES include
  DOC "Folder of NvInferRuntime.h")
if(NOT TENSORRT_INCLUDE_DIR OR NOT EXISTS ${TENSORRT_INCLUDE_DIR}/NvInferRuntime.h)
  message(FATAL_ERROR "TensorRT's headers (NvInferRuntime.h) were not found. Either\n"
    "  - install them with the packages of NVIDIA's repository (libnvinfer-headers-dev), or\n"
    "  - unpack TensorRT's archive and pass -DTensorRT_ROOT=<folder>, or\n"
    "  - git clone --depth 1 --branch v11.1 https://github.com/NVIDIA/TensorRT and pass\n"
    "    -DTENSORRT_INCLUDE_DIR=<that folder>; take the branch of the TensorRT that will run the engines.\n"
    "Python packages of TensorRT do not contain them.")
endif()

file(STRINGS ${TENSORRT_INCLUDE_DIR}/NvInferVersion.h version_lines
  REGEX "#define (NV_TENSORRT|TRT)_(MAJOR|MINOR)(_ENTERPRISE)? +[0-9]+")
string(REGEX MATCH "MAJOR(_ENTERPRISE)? +([0-9]+)" ignored "${version_lines}")
set(TENSORRT_VERSION ${CMAKE_MATCH_2})
string(REGEX MATCH "MINOR(_ENTERPRISE)? +([0-9]+)" ignored "${version_lines}")
set(TENSORRT_VERSION ${TENSORRT_VERSION}.${CMAKE_MATCH_2})
if(TENSORRT_VERSION VERSION_LESS 10.4)
  message(FATAL_ERROR "${TENSORRT_INCLUDE_DIR} is of TensorRT ${TENSORRT_VERSION}; the plugins need 10.4 or newer")
endif()
message(STATUS "TensorRT ${TENSORRT_VERSION} headers: ${TENSORRT_INCLUDE_DIR}")

find_path(CUDA_INCLUDE_DIR cuda_runtime_api.h
  HINTS ${CUDAToolkit_ROOT} ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda
  PATH_SUFFIXES include
  DOC "Folder of cuda.h and cuda_runtime_api.h")
if(NOT CUDA_INCLUDE_DIR OR NOT EXISTS ${CUDA_INCLUDE_DIR}/cuda.h)
  message(FATAL_ERROR "CUDA's headers (cuda.h, cuda_runtime_api.h) were not found. Install a CUDA toolkit, or "
    "pip install nvidia-cuda-runtime and pass -DCUDA_INCLUDE_DIR=<site-packages>/nvidia/cu13/include")
endif()
