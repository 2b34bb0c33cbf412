#include "cuda/library.h"

#include "base/knob.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

/* NODELETE: these libraries run threads of their own, whose code must not vanish with our last handle. */
#define FLAGS (RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)

static void remember(cd_library *library, const char *where, const char *why)
{
    size_t used = strlen(library->tried);
    snprintf(library->tried + used, sizeof library->tried - used, "%s%s (%s)", used ? ", " : "", where, why);
}

static bool try_open(cd_library *library, const char *path)
{
    library->handle = dlopen(path, FLAGS);
    if (library->handle)
        return true;
    const char *why = dlerror();
    size_t length = strlen(path);
    if (!why || strstr(why, "No such file"))
        why = "not there";
    else if (strncmp(why, path, length) == 0 && strncmp(why + length, ": ", 2) == 0)
        why += length + 2; /* "path: invalid ELF header" */
    remember(library, path, why);
    return false;
}

static bool take_loaded(cd_library *library, const cd_library_wish *wish)
{
    for (int i = 0; i < wish->name_count; i++)
        if ((library->handle = dlopen(wish->names[i], FLAGS | RTLD_NOLOAD)))
            return true;
    remember(library, "this process", "not loaded");
    return false;
}

typedef struct {
    char sites[8][PATH_MAX];
    int count;
} site_list;

/* Collects the site folders that loaded objects come from. */
static int note_site(struct dl_phdr_info *info, size_t bytes, void *ctx)
{
    (void)bytes;
    static const char *const marks[] = {"/site-packages/", "/dist-packages/"};
    site_list *list = ctx;
    for (int m = 0; m < 2; m++) {
        const char *at = info->dlpi_name ? strstr(info->dlpi_name, marks[m]) : 0;
        size_t length = at ? (size_t)(at - info->dlpi_name) + strlen(marks[m]) : 0;
        if (!at || length >= PATH_MAX)
            continue;
        bool known = false;
        for (int i = 0; i < list->count; i++)
            known |= strlen(list->sites[i]) == length && memcmp(list->sites[i], info->dlpi_name, length) == 0;
        if (known)
            return 0;
        memcpy(list->sites[list->count], info->dlpi_name, length);
        list->sites[list->count++][length] = 0;
        return list->count == 8;
    }
    return 0;
}

static bool try_sites(cd_library *library, const cd_library_wish *wish)
{
    site_list list = {.count = 0};
    dl_iterate_phdr(note_site, &list);
    for (int i = 0; i < list.count; i++) {
        for (int n = 0; n < wish->name_count; n++) {
            char path[PATH_MAX + 128];
            snprintf(path, sizeof path, "%s%s/%s", list.sites[i], wish->folder, wish->names[n]);
            if (try_open(library, path))
                return true;
        }
    }
    if (list.count == 0)
        remember(library, wish->folder, "this process uses no Python site folder");
    return false;
}

static bool try_system(cd_library *library, const cd_library_wish *wish)
{
    for (int i = 0; i < wish->name_count; i++)
        if (try_open(library, wish->names[i]))
            return true;
    return false;
}

cd_status cd_library_open(cd_library *library, const cd_library_wish *wish)
{
    memset(library, 0, sizeof *library);
    const char *chosen = cd_knob(wish->setting);
    if (*chosen) {
        if (try_open(library, chosen))
            return CD_OK;
        return cd_fail(CD_UNSUPPORTED, "%s cannot be loaded: %s names %s", wish->title, wish->setting, library->tried);
    }
    if (take_loaded(library, wish) || (wish->folder && try_sites(library, wish)) || try_system(library, wish))
        return CD_OK;
    return cd_fail(CD_UNSUPPORTED, "%s was not found; looked at: %s; %s can name it", wish->title, library->tried,
                   wish->setting);
}

void *cd_library_find(const cd_library *library, const char *symbol)
{
    return dlsym(library->handle, symbol);
}

const char *cd_library_path(const cd_library *library)
{
    struct link_map *map = 0;
    return dlinfo(library->handle, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name[0] ? map->l_name : "a loaded library";
}

void cd_library_close(cd_library *library)
{
    if (library->handle)
        dlclose(library->handle);
    library->handle = 0;
}
