// The library of compiled kernels. It is one translation unit: the headers have functions without external names, of
// which the compiler makes inline code.

#include "attention.h"
#include "chain.h"
#include "native.h"
#include "orthogonal.h"
#include "winograd.h"
