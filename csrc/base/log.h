/* What the library says, on stderr, when asked: CDIST_LOG is a comma list of a level (error, warn, info, debug) and topics
 * (plan, stall, store, net, ddp, gpu). Default: warn. */
#ifndef CD_BASE_LOG_H
#define CD_BASE_LOG_H

#include "base/attr.h"

#include <stdbool.h>

typedef enum { CD_LOG_ERROR = 0, CD_LOG_WARN, CD_LOG_INFO, CD_LOG_DEBUG } cd_log_level;

/* One line "cdist[pid] <level>: text" in a single write. Any thread; blocks only as stderr does. */
void cd_log(cd_log_level level, const char *format, ...) CD_PRINTF(2, 3);
bool cd_log_wants(cd_log_level level);
/* CDIST_LOG is read anew at the next line: a program (or the child of a fork) may have changed it since the first. Any thread. */
void cd_log_reread(void);
/* True when the topic was named in CDIST_LOG. */
bool cd_log_topic(const char *topic);
/* The same line format, shown when the topic was named. */
void cd_log_about(const char *topic, const char *format, ...) CD_PRINTF(2, 3);

#endif
