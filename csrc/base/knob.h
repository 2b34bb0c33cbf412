/* The settings: one row each. Parser, error texts and the README's table come from the same row. */
#ifndef CD_BASE_KNOB_H
#define CD_BASE_KNOB_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef enum {
    CD_KNOB_TEXT,  /* read by whoever uses it */
    CD_KNOB_WORD,  /* one of `words`, in any case */
    CD_KNOB_LIST,  /* some of `words`, by comma or blank */
    CD_KNOB_NUMBER /* from 0 to `most`, with an optional suffix K, M or G; or the one word of `words` */
} cd_knob_kind;

typedef struct {
    const char *name;
    const char *fallback; /* used when the variable is unset or empty */
    cd_knob_kind kind;
    const char *words; /* "a, b, c", or NULL */
    uint64_t most;
    const char *help;
} cd_knob_row;

const cd_knob_row *cd_knob_rows(size_t *count_p);
/* Value of a setting as text; `name` must be a row's. Never NULL. */
const char *cd_knob(const char *name);
/* Whether its value is `word`, in any case. */
bool cd_knob_is(const char *name, const char *word);
/* Which of its row's words the value is, from 0. CD_BAD_ARGUMENT names the setting and the words. */
cd_status cd_knob_choice(const char *name, int *index_p);
/* Its value as a number. CD_BAD_ARGUMENT names the setting, its text and the range. */
cd_status cd_knob_number(const char *name, uint64_t *value_p);
/* Whether a list by comma or blank has a word (of `word_bytes` characters), in any case. */
bool cd_knob_list_has(const char *list, const char *word, size_t word_bytes);
/* CD_BAD_ARGUMENT for the first setting whose value its kind does not allow. Any thread. */
cd_status cd_knob_check(void);
/* Logs a warning of the CDIST_ variables that are no setting, once per process. Any thread. */
void cd_knob_report_unknown(void);

#endif
