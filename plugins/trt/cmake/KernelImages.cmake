# Sets TIDE_KERNEL_IMAGES_SOURCE: a source file with the compiled kernels in it.
#
# nvcc makes one fat binary a kernel, for every architecture of the project's list that it knows. Without nvcc, or for others (sm_70
# needs CUDA 12), -DTIDE_KERNEL_IMAGES names the folder that `python -m tide_plugins build --out` wrote, or single files named
# KERNEL.ANYTHING: fat binaries, cubins or PTX. The library takes the first image that the GPU's driver accepts: a fat binary, else
# the cubin of the newest architecture that fits, else PTX, which the driver compiles.

set(TIDE_KERNELS exit_router exit_select)
set(TIDE_KERNEL_IMAGES "" CACHE STRING "Folder of `python -m tide_plugins build --out`, or image files")
set(TIDE_CUDA_ARCHITECTURES 70 75 80 86 87 89 90 100 103 110 120 121 CACHE STRING "Architectures to compile for, if nvcc knows them")
find_program(TIDE_NVCC nvcc HINTS ${CUDAToolkit_ROOT} ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)

# The -gencode options for the architectures that nvcc knows, with PTX of the newest for GPUs to come.
function(tide_gencode result)
  execute_process(COMMAND ${TIDE_NVCC} --list-gpu-code OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "sm_[0-9]+" known "${known}")
  foreach(architecture IN LISTS TIDE_CUDA_ARCHITECTURES)
    if(sm_${architecture} IN_LIST known)
      list(APPEND options -gencode arch=compute_${architecture},code=sm_${architecture})
      set(newest ${architecture})
    else()
      message(STATUS "${TIDE_NVCC} does not know sm_${architecture}; add its images with -DTIDE_KERNEL_IMAGES")
    endif()
  endforeach()
  if(NOT newest)
    message(FATAL_ERROR "${TIDE_NVCC} knows none of ${TIDE_CUDA_ARCHITECTURES}; change -DTIDE_CUDA_ARCHITECTURES")
  endif()
  set(${result} ${options} -gencode arch=compute_${newest},code=compute_${newest} PARENT_SCOPE)
endfunction()

function(tide_compile kernel gencode result)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/${kernel}.fatbin)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${kernel}.cu)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${kernel}.cuh\"\n")
  file(GLOB headers CONFIGURE_DEPENDS ${TIDE_KERNEL_SOURCES}/*.cuh ${TIDE_KERNEL_SOURCES}/*.h)
  add_custom_command(OUTPUT ${image}
    COMMAND ${TIDE_NVCC} -fatbin -std=c++17 -O3 ${gencode} -I ${TIDE_KERNEL_SOURCES} -o ${image} ${source}
    DEPENDS ${source} ${headers} VERBATIM COMMENT "Compiling kernel ${kernel}")
  set(${result} ${image} PARENT_SCOPE)
endfunction()

if(TIDE_NVCC AND TIDE_CUDA_ARCHITECTURES)
  tide_gencode(gencode)
  foreach(kernel IN LISTS TIDE_KERNELS)
    tide_compile(${kernel} "${gencode}" image)
    list(APPEND images ${image})
  endforeach()
endif()
foreach(given IN LISTS TIDE_KERNEL_IMAGES)
  if(IS_DIRECTORY ${given})
    list(TRANSFORM TIDE_KERNELS PREPEND ${given}/ OUTPUT_VARIABLE stems)
    list(TRANSFORM stems APPEND .*.cubin OUTPUT_VARIABLE cubin_patterns)
    list(TRANSFORM stems APPEND .*.ptx OUTPUT_VARIABLE ptx_patterns)
    file(GLOB cubins ${cubin_patterns})
    list(SORT cubins COMPARE NATURAL ORDER DESCENDING)
    file(GLOB ptx ${ptx_patterns})
    list(APPEND images ${cubins} ${ptx})
  else()
    list(APPEND images ${given})
  endif()
endforeach()
if(NOT images)
  message(FATAL_ERROR "There is no nvcc to compile the kernels with. Install a CUDA toolkit (or pip install nvidia-cuda-nvcc and pass "
    "-DTIDE_NVCC=<nvcc>), or run `python -m tide_plugins build --out FOLDER` and pass -DTIDE_KERNEL_IMAGES=FOLDER")
endif()

foreach(image IN LISTS images)
  cmake_path(GET image FILENAME file)
  cmake_path(GET image STEM kernel)
  if(NOT kernel IN_LIST TIDE_KERNELS)
    message(FATAL_ERROR "${image} is not named after a kernel; it must begin with one of: ${TIDE_KERNELS}")
  endif()
  string(MAKE_C_IDENTIFIER ${file} symbol)
  # The 0 ends PTX, which the driver reads as text; it does not harm the others.
  string(APPEND assembly "__asm__(\".section .rodata\\n.balign 64\\n.hidden tide_${symbol}\\n.global tide_${symbol}\\n\"\n"
    "        \"tide_${symbol}: .incbin \\\"${image}\\\"\\n.byte 0\\n.previous\\n\");\n")
  string(APPEND declarations "extern \"C\" char const tide_${symbol}[];\n")
  string(APPEND table "    {\"${kernel}\", \"${file}\", tide_${symbol}},\n")
  math(EXPR image_count "${image_count} + 1")
endforeach()
set(TIDE_KERNEL_IMAGES_SOURCE ${CMAKE_CURRENT_BINARY_DIR}/kernel_images.cpp)
configure_file(${CMAKE_CURRENT_LIST_DIR}/kernel_images.cpp.in ${TIDE_KERNEL_IMAGES_SOURCE} @ONLY)
set_source_files_properties(${TIDE_KERNEL_IMAGES_SOURCE} PROPERTIES OBJECT_DEPENDS "${images}")
