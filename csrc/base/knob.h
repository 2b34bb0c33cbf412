/* The settings: one row each (name, default, meaning). Parser, error texts and the README's table come from the same row. */
#ifndef CD_BASE_KNOB_H
#define CD_BASE_KNOB_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name;
    const char *fallback; /* used when the variable is unset or empty */
    const char *help;
} cd_knob_row;

const cd_knob_row *cd_knob_rows(size_t *count_p);
/* Value of a setting as text; `name` must be a row's. Never NULL. */
const char *cd_knob(const char *name);
/* As a number with an optional suffix K, M, G. CD_BAD_ARGUMENT names the setting, its text and the range. */
cd_status cd_knob_number(const char *name, uint64_t least, uint64_t most, uint64_t *value_p);
bool cd_knob_flag(const char *name); /* "1", "true", "yes", "on" in any case */

#endif
