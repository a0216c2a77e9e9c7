/* Attention over the pool, for one instruction set. */
#include "vec.h"

#include "kv_store.h"
#include "kv_tiles.h"

#include "attend.h"
