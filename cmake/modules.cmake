# Python modules by nanobind: what they need, how one is made, and the file that says what was built.

# Finds Python's headers and nanobind, or sets the variable `missing` to a clause that says what is missing and what to
# install. The interpreter itself is required. A macro, because nanobind reads the variables of find_package(Python).
macro(jaxfp8_find_python missing)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module Development.SABIModule)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    OUTPUT_VARIABLE free_threaded OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(free_threaded)
    set(${missing} "this Python is a free-threaded build: use one with the global interpreter lock")
  elseif(NOT TARGET Python::Module)
    set(${missing} "Python.h of Python ${Python_VERSION} was not found: install it (Debian and Ubuntu: \
apt install python3-dev), then jaxfp8 again")
  else()
    execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir OUTPUT_VARIABLE nanobind_ROOT
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_package(nanobind CONFIG QUIET)
    if(NOT nanobind_FOUND)
      set(${missing} "nanobind was not found: pip install nanobind, then jaxfp8 again")
    endif()
  endif()
endmacro()

# Makes the Python module `name` of a source file and the libraries that do its work. It exports nothing but its
# initialization. Abi3 where Python has it (3.12 and newer): one file serves them all.
function(jaxfp8_add_module name source)
  set(options STABLE_ABI NB_STATIC NB_SUPPRESS_WARNINGS)
  if(JAXFP8_SANITIZE)
    list(APPEND options NOSTRIP)
  endif()
  # Nanobind as one file: its headers, most of the work, are read once.
  set(CMAKE_UNITY_BUILD ON)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 0)
  nanobind_add_module(${name} ${options} ${source})
  set_target_properties(${name} PROPERTIES UNITY_BUILD OFF)
  target_compile_options(${name} PRIVATE -Wall -Wextra)
  target_link_libraries(${name} PRIVATE jaxfp8_headers ${ARGN})
  # Hidden visibility does not reach the standard library's templates; an export list does.
  if(APPLE)
    target_link_options(${name} PRIVATE "LINKER:-exported_symbol,_PyInit_*")
  else()
    set(exports "${PROJECT_SOURCE_DIR}/common/exports.map")
    target_link_options(${name} PRIVATE "LINKER:--version-script=${exports}")
    set_target_properties(${name} PROPERTIES LINK_DEPENDS "${exports}")
  endif()
  install(TARGETS ${name} LIBRARY DESTINATION jaxfp8)
endfunction()

# Writes jaxfp8/_modules.txt, a line for each module, and prints it at the end: `pip install -v` shows that.
function(jaxfp8_finish)
  set(text "")
  foreach(module CPU CUDA)
    string(TOLOWER ${module} name)
    set(pythons "Python ${Python_VERSION}")
    if(TARGET nanobind-static-abi3)
      set(pythons "Python 3.12 and newer")
    endif()
    set(line "built by ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} for ${pythons}")
    if(JAXFP8_${module}_MISSING)
      set(line "not built: ${JAXFP8_${module}_MISSING}")
    endif()
    string(APPEND text "${name}: ${line}\n")
  endforeach()
  if(JAXFP8_CUDA STREQUAL "ON" AND JAXFP8_CUDA_MISSING)
    message(FATAL_ERROR "jaxfp8: JAXFP8_CUDA=ON, but ${JAXFP8_CUDA_MISSING}")
  endif()
  file(WRITE "${PROJECT_BINARY_DIR}/_modules.txt" "${text}")
  install(FILES "${PROJECT_BINARY_DIR}/_modules.txt" DESTINATION jaxfp8)
  install(CODE "file(STRINGS \"${PROJECT_BINARY_DIR}/_modules.txt\" lines)
    foreach(line IN LISTS lines)
      message(STATUS \"jaxfp8: \${line}\")
    endforeach()")
endfunction()
