#include "base/log.h"

#include "base/knob.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warn", "info", "debug"};

static bool setting_has(const char *word)
{
    return cd_knob_list_has(cd_knob("CDIST_LOG"), word, strlen(word));
}

/* 0 = to be read; otherwise level + 1. Every thread would compute the same value. */
static _Atomic int cached;

void cd_log_reread(void)
{
    atomic_store_explicit(&cached, 0, memory_order_relaxed);
}

bool cd_log_wants(cd_log_level level)
{
    int wanted = atomic_load_explicit(&cached, memory_order_relaxed);
    if (wanted == 0) {
        wanted = CD_LOG_WARN + 1;
        for (int i = 0; i <= CD_LOG_DEBUG; i++)
            if (setting_has(level_names[i]))
                wanted = i + 1;
        atomic_store_explicit(&cached, wanted, memory_order_relaxed);
    }
    return (int)level < wanted;
}

bool cd_log_topic(const char *topic)
{
    return setting_has(topic);
}

static void write_line(const char *label, const char *format, va_list args)
{
    char line[2048];
    int used = snprintf(line, sizeof line, "cdist[%d] %s: ", (int)getpid(), label);
    int more = vsnprintf(line + used, sizeof line - (size_t)used - 1, format, args);
    size_t bytes = (size_t)used + (more > 0 ? (size_t)more : 0);
    if (bytes > sizeof line - 2)
        bytes = sizeof line - 2;
    line[bytes++] = '\n';
    /* A log line that cannot be written is dropped: there is nobody to tell. */
    if (write(STDERR_FILENO, line, bytes) < 0)
        return;
}

void cd_log(cd_log_level level, const char *format, ...)
{
    if (!cd_log_wants(level))
        return;
    va_list args;
    va_start(args, format);
    write_line(level_names[level], format, args);
    va_end(args);
}

void cd_log_about(const char *topic, const char *format, ...)
{
    if (!cd_log_topic(topic))
        return;
    va_list args;
    va_start(args, format);
    write_line(topic, format, args);
    va_end(args);
}
