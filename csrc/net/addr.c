#include "net/addr.h"

#include "base/knob.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void cd_addr_text(const struct sockaddr *address, char *out, size_t bytes)
{
    const void *number = address->sa_family == AF_INET6 ? (const void *)&((const struct sockaddr_in6 *)address)->sin6_addr
                                                        : (const void *)&((const struct sockaddr_in *)address)->sin_addr;
    if (!inet_ntop(address->sa_family, number, out, (socklen_t)bytes))
        snprintf(out, bytes, "?");
}

socklen_t cd_addr_bytes(const struct sockaddr_storage *address)
{
    return address->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

/* A numeric address and port as one. */
static bool of_number(const char *text, uint16_t port, struct sockaddr_storage *out)
{
    *out = (struct sockaddr_storage){0};
    struct sockaddr_in *four = (struct sockaddr_in *)out;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)out;
    if (inet_pton(AF_INET, text, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons(port);
        return true;
    }
    if (inet_pton(AF_INET6, text, &six->sin6_addr) == 1) {
        six->sin6_family = AF_INET6;
        six->sin6_port = htons(port);
        return true;
    }
    return false;
}

/* A number, or a name that whoever gives it means loopback by. */
static bool is_meant(const char *host)
{
    struct sockaddr_storage number;
    return of_number(host, 0, &number) || strcasestr(host, "localhost") || strcasestr(host, "loopback");
}

static bool is_among(const struct sockaddr_storage *one, const struct sockaddr_storage *list, int count)
{
    for (int i = 0; i < count; i++)
        if (one->ss_family == list[i].ss_family && memcmp(one, &list[i], cd_addr_bytes(one)) == 0)
            return true;
    return false;
}

static cd_status lead_outward(const char *host, uint16_t port, struct sockaddr_storage *out, int most, int *count_p)
{
    int count = *count_p;
    bool is_here = false, found;
    for (int i = 0; i < count; i++)
        is_here = is_here || cd_addr_is_loopback_of(&out[i]);
    struct sockaddr_storage outward;
    if (!is_here || is_meant(host))
        return CD_OK;
    CD_TRY(cd_addr_outward(port, &outward, &found));
    if (!found || is_among(&outward, out, count))
        return CD_OK;
    count = count < most ? count : most - 1;
    memmove(out + 1, out, (size_t)count * sizeof *out);
    out[0] = outward;
    *count_p = count + 1;
    return CD_OK;
}

cd_status cd_addr_resolve(const char *host, uint16_t port, struct sockaddr_storage *out, int most, int *count_p)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    struct addrinfo *list;
    int error = getaddrinfo(host, service, &hints, &list);
    if (error)
        return cd_fail(CD_NETWORK, "cannot resolve host '%s': %s", host, gai_strerror(error));
    int count = 0;
    for (struct addrinfo *a = list; a && count < most; a = a->ai_next) {
        if (a->ai_family != AF_INET && a->ai_family != AF_INET6)
            continue;
        out[count] = (struct sockaddr_storage){0};
        memcpy(&out[count], a->ai_addr, a->ai_addrlen);
        count += !is_among(&out[count], out, count);
    }
    freeaddrinfo(list);
    if (!count)
        return cd_fail(CD_NETWORK, "host '%s' has no IPv4 or IPv6 address", host);
    *count_p = count;
    return lead_outward(host, port, out, most, count_p);
}

/* A connected datagram socket sends nothing, but the kernel has chosen its source address by the route. */
static bool route_source(const struct sockaddr_storage *to, char *out, size_t bytes)
{
    int probe = socket(to->ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (probe < 0)
        return false;
    struct sockaddr_storage from;
    socklen_t from_bytes = sizeof from;
    bool found = connect(probe, (const struct sockaddr *)to, cd_addr_bytes(to)) == 0 &&
                 getsockname(probe, (struct sockaddr *)&from, &from_bytes) == 0;
    close(probe);
    if (found)
        cd_addr_text((struct sockaddr *)&from, out, bytes);
    return found;
}

static bool in_block(const struct sockaddr *address, const char *block)
{
    char text[64];
    snprintf(text, sizeof text, "%s", block);
    char *slash = strchr(text, '/');
    *slash = 0;
    int bits = atoi(slash + 1);
    unsigned char want[16], have[16];
    int family = strchr(text, ':') ? AF_INET6 : AF_INET;
    if (address->sa_family != family || inet_pton(family, text, want) != 1 || bits < 0 || bits > (family == AF_INET ? 32 : 128))
        return false;
    if (family == AF_INET)
        memcpy(have, &((const struct sockaddr_in *)address)->sin_addr, 4);
    else
        memcpy(have, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
    for (int i = 0; i < bits; i++)
        if ((want[i / 8] ^ have[i / 8]) & (0x80 >> (i % 8)))
            return false;
    return true;
}

static bool matches(const struct ifaddrs *interface, const char *word)
{
    return strchr(word, '/') ? in_block(interface->ifa_addr, word) : strncmp(interface->ifa_name, word, strlen(word)) == 0;
}

static bool is_usable(const struct ifaddrs *i)
{
    return i->ifa_addr && (i->ifa_flags & IFF_UP) &&
           (i->ifa_addr->sa_family == AF_INET ||
            (i->ifa_addr->sa_family == AF_INET6 &&
             !IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)i->ifa_addr)->sin6_addr)));
}

static cd_status no_interface(const char *variable, const char *setting, const struct ifaddrs *list)
{
    char known[512] = "";
    size_t used = 0;
    for (const struct ifaddrs *i = list; i && used < sizeof known - 80; i = i->ifa_next)
        if (is_usable(i)) {
            char number[48];
            cd_addr_text(i->ifa_addr, number, sizeof number);
            used += (size_t)snprintf(known + used, sizeof known - used, "%s%s (%s)", used ? ", " : "", i->ifa_name, number);
        }
    return cd_fail(CD_BAD_ARGUMENT, "%s='%s' names no interface of this host; there are: %s", variable, setting, known);
}

static cd_status named_interface(const char *variable, const char *setting, char *out, size_t bytes)
{
    struct ifaddrs *list;
    if (getifaddrs(&list) != 0)
        return cd_fail_errno(CD_NETWORK, errno, "cannot list network interfaces");
    char words[256];
    snprintf(words, sizeof words, "%s", setting);
    char *rest = words;
    bool found = false;
    for (char *word; !found && (word = strtok_r(rest, ", ", &rest));)
        for (struct ifaddrs *i = list; i && !found; i = i->ifa_next)
            if (is_usable(i) && matches(i, word)) {
                cd_addr_text(i->ifa_addr, out, bytes);
                found = true;
            }
    cd_status status = found ? CD_OK : no_interface(variable, setting, list);
    freeifaddrs(list);
    return status;
}

cd_status cd_addr_setting(char *out, size_t bytes)
{
    static const char *const variables[] = {"CDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"};
    for (int i = 0; i < 2; i++) {
        const char *setting = cd_knob(variables[i]);
        if (*setting)
            return named_interface(variables[i], setting, out, bytes);
    }
    out[0] = 0;
    return CD_OK;
}

/* The first address of an interface that is up and has a cable, IPv4 before IPv6, as text. */
static bool first_interface(char *out, size_t bytes)
{
    struct ifaddrs *list;
    if (getifaddrs(&list) != 0)
        return false;
    bool found = false;
    for (int six = 0; six < 2 && !found; six++)
        for (struct ifaddrs *i = list; i && !found; i = i->ifa_next)
            if (is_usable(i) && !(i->ifa_flags & IFF_LOOPBACK) && (i->ifa_flags & IFF_RUNNING) &&
                (i->ifa_addr->sa_family == AF_INET6) == six) {
                cd_addr_text(i->ifa_addr, out, bytes);
                found = true;
            }
    freeifaddrs(list);
    return found;
}

cd_status cd_addr_outward(uint16_t port, struct sockaddr_storage *out, bool *found_p)
{
    /* Set aside for documentation, so that no route but the default one leads there. */
    static const char *const far_away[] = {"192.0.2.1", "2001:db8::1"};
    char text[64];
    CD_TRY(cd_addr_setting(text, sizeof text));
    bool found = text[0] != 0;
    for (int i = 0; i < 2 && !found; i++) {
        struct sockaddr_storage far;
        found = of_number(far_away[i], 1, &far) && route_source(&far, text, sizeof text) && !cd_addr_is_loopback(text);
    }
    found = found || first_interface(text, sizeof text);
    *found_p = found && of_number(text, port, out);
    return CD_OK;
}

bool cd_addr_is_loopback_of(const struct sockaddr_storage *address)
{
    char text[64];
    cd_addr_text((const struct sockaddr *)address, text, sizeof text);
    return cd_addr_is_loopback(text);
}

bool cd_addr_stays_here(const char *host)
{
    struct sockaddr_storage found[8];
    int count;
    if (cd_addr_resolve(host, 1, found, 8, &count) != CD_OK)
        return false;
    for (int i = 0; i < count; i++)
        if (!cd_addr_is_loopback_of(&found[i]))
            return false;
    return true;
}

bool cd_addr_is_loopback(const char *address)
{
    return strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0;
}

cd_status cd_addr_local_for(const char *host, uint16_t port, char *out, size_t bytes)
{
    CD_TRY(cd_addr_setting(out, bytes));
    if (out[0])
        return CD_OK;
    struct sockaddr_storage found[8];
    int count;
    CD_TRY(cd_addr_resolve(host, port ? port : 1, found, 8, &count));
    for (int i = 0; i < count; i++)
        if (route_source(&found[i], out, bytes))
            return CD_OK;
    return cd_fail(CD_NETWORK, "no route to host '%s'", host);
}

/* Mbit/s as the driver tells it; 0: it does not (loopback, bridges). */
static long speed_of(const char *interface)
{
    char path[96], text[24] = "";
    snprintf(path, sizeof path, "/sys/class/net/%s/speed", interface);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    long speed = got > 0 ? strtol(text, NULL, 10) : 0;
    return speed > 0 ? speed : 0;
}

const char *cd_addr_interface(const char *address, char *out, size_t bytes)
{
    snprintf(out, bytes, "unknown interface");
    struct ifaddrs *list;
    if (getifaddrs(&list) != 0)
        return out;
    for (const struct ifaddrs *i = list; i; i = i->ifa_next) {
        char number[64];
        if (!is_usable(i))
            continue;
        cd_addr_text(i->ifa_addr, number, sizeof number);
        if (strcmp(number, address) != 0)
            continue;
        long speed = speed_of(i->ifa_name);
        if (speed)
            snprintf(out, bytes, "%s, %ld Mbit/s", i->ifa_name, speed);
        else
            snprintf(out, bytes, "%s, speed unknown", i->ifa_name);
        break;
    }
    freeifaddrs(list);
    return out;
}
