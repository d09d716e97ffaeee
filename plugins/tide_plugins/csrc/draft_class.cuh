// Classes of drafts by the tokens that match before them, whose rates text_accept counts and text_drafts reads.
#pragma once

#include "portable.h"

namespace tide {

// The class of a draft after `matched` tokens, of `classes` that begin with `least`, rising.
__device__ __forceinline__ int draft_class(const int32_t* least, int classes, int32_t matched) {
  int found = 0;
  for (int i = 1; i < classes; ++i) found += least[i] <= matched;
  return found;
}

}  // namespace tide
