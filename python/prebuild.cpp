// What the headers of newer C and C++ libraries refer to, for shims that load with the libraries of manylinux_2_28:
// glibc 2.28 and GCC 8's libstdc++. A linker script hides all of it.
#include <exception>
#include <new>
#include <sstream>

// glibc 2.32. While it is zero, reference counts are atomic, which is always right.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

// GCC 11. Its headers have the copies and the destructor of exception_ptr inline, over these two functions. Older
// libraries export the copy and the destructor themselves.
extern "C" void copy_exception(void* copy, const std::exception_ptr& original) noexcept;
extern "C" void destroy_exception(std::exception_ptr* exception) noexcept;
__asm__(".symver copy_exception, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver destroy_exception, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");

void std::__exception_ptr::exception_ptr::_M_addref() noexcept {
  // The copy is never destroyed: its reference is the one that is added.
  alignas(exception_ptr) char copy[sizeof(exception_ptr)];
  copy_exception(copy, *this);
}

void std::__exception_ptr::exception_ptr::_M_release() noexcept {
  destroy_exception(this);
}

// GCC 11.
void std::__throw_bad_array_new_length() {
  throw std::bad_array_new_length();
}

// GCC 9.
template std::ostringstream::basic_ostringstream();

#if __cplusplus >= 202002L
// GCC 11.
template std::string std::stringbuf::str() &&;
#endif
