/* Preloaded into a process, fails or holds up its file operations as fault_set() says.
 *
 * The call that the program makes is the one that fails: its error handling, its retries and its
 * threads are the real ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, SYNC, RENAME, UNLINK, TRUNCATE, CREATE };
enum { OFF, FAIL, SHORT, BLOCK, DELAY };

#define SLOTS 8
static struct {
    volatile int mode;
    int operation, number;
    volatile long left; /* calls that it still meets; negative: all */
    double seconds;
    char part[256]; /* of the file's path */
    volatile long met, held;
} rules[SLOTS];

void fault_set(int slot, int operation, int mode, int number, long times, double seconds,
               const char *part) {
    rules[slot].mode = OFF;
    rules[slot].operation = operation;
    rules[slot].number = number;
    rules[slot].left = times;
    rules[slot].seconds = seconds;
    rules[slot].met = rules[slot].held = 0;
    snprintf(rules[slot].part, sizeof rules[slot].part, "%s", part);
    __sync_synchronize();
    rules[slot].mode = mode;
}

void fault_clear(void) {
    for (int slot = 0; slot < SLOTS; slot++) rules[slot].mode = OFF;
}

long fault_met(int slot) { return rules[slot].met; }
long fault_held(int slot) { return rules[slot].held; } /* calls held up now */

/* The mode that a call meets: FAIL with errno set, SHORT, or OFF after any delay. */
static int meet(int operation, const char *path) {
    for (int slot = 0; slot < SLOTS; slot++) {
        int mode = rules[slot].mode;
        if (mode == OFF || rules[slot].operation != operation || !strstr(path, rules[slot].part))
            continue;
        if (rules[slot].left >= 0 && __sync_fetch_and_sub(&rules[slot].left, 1) <= 0) continue;
        __sync_fetch_and_add(&rules[slot].met, 1);
        if (mode == DELAY) {
            __sync_fetch_and_add(&rules[slot].held, 1);
            usleep((useconds_t)(rules[slot].seconds * 1e6));
            __sync_fetch_and_sub(&rules[slot].held, 1);
            return OFF;
        }
        if (mode == BLOCK) {
            __sync_fetch_and_add(&rules[slot].held, 1);
            while (rules[slot].mode == BLOCK) usleep(1000);
            __sync_fetch_and_sub(&rules[slot].held, 1);
            return OFF;
        }
        errno = rules[slot].number;
        return mode;
    }
    return OFF;
}

static int meet_fd(int operation, int fd) {
    char link[64], path[1024];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (size < 0) return OFF;
    path[size] = 0;
    return meet(operation, path);
}

#define REAL(type, name, ...)                                     \
    static type (*real)(__VA_ARGS__);                             \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define OPENER(name)                                                                        \
    int name(const char *path, int flags, ...) {                                            \
        REAL(int, name, const char *, int, ...);                                            \
        va_list rest;                                                                       \
        va_start(rest, flags);                                                              \
        mode_t mode = va_arg(rest, mode_t);                                                 \
        va_end(rest);                                                                       \
        if (meet(flags & O_CREAT ? CREATE : OPEN, path) == FAIL) return -1;                 \
        return real(path, flags, mode);                                                     \
    }
OPENER(open)
OPENER(open64)

/* Reads that come short have read it all: only their answer is less. */
#define READER(name, parameters, arguments, ...)                      \
    ssize_t name parameters {                                         \
        REAL(ssize_t, name, __VA_ARGS__);                             \
        int mode = meet_fd(READ, fd);                                 \
        if (mode == FAIL) return -1;                                  \
        ssize_t got = real arguments;                                 \
        return mode == SHORT && got > 2 ? got / 2 + 1 : got;          \
    }
READER(pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at), int, void *, size_t, off_t)
READER(pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at), int, void *, size_t, off64_t)
READER(preadv, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at), int, const struct iovec *, int, off_t)
READER(preadv64, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at), int, const struct iovec *, int, off64_t)
READER(preadv2, (int fd, const struct iovec *v, int n, off_t at, int f), (fd, v, n, at, f), int, const struct iovec *, int, off_t, int)
READER(preadv64v2, (int fd, const struct iovec *v, int n, off64_t at, int f), (fd, v, n, at, f), int, const struct iovec *, int, off64_t, int)
READER(read, (int fd, void *data, size_t size), (fd, data, size), int, void *, size_t)

/* Writes that come short have written whole blocks, as a file system that fills up does. */
static size_t shorter(size_t size) { return size > 8192 ? size / 2 & ~(size_t)4095 : size > 2 ? size / 2 : size; }

#define WRITER(name, parameters, arguments, ...)                      \
    ssize_t name parameters {                                         \
        REAL(ssize_t, name, __VA_ARGS__);                             \
        int mode = meet_fd(WRITE, fd);                                \
        if (mode == FAIL) return -1;                                  \
        if (mode == SHORT) size = shorter(size);                      \
        return real arguments;                                        \
    }
WRITER(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), int, const void *, size_t, off_t)
WRITER(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), int, const void *, size_t, off64_t)
WRITER(write, (int fd, const void *data, size_t size), (fd, data, size), int, const void *, size_t)

#define SIMPLE(name, operation, parameters, arguments, meeting, ...)  \
    int name parameters {                                             \
        REAL(int, name, __VA_ARGS__);                                 \
        if (meeting == FAIL) return -1;                               \
        return real arguments;                                        \
    }
SIMPLE(fdatasync, SYNC, (int fd), (fd), meet_fd(SYNC, fd), int)
SIMPLE(fsync, SYNC, (int fd), (fd), meet_fd(SYNC, fd), int)
SIMPLE(rename, RENAME, (const char *a, const char *b), (a, b), meet(RENAME, b), const char *, const char *)
SIMPLE(unlink, UNLINK, (const char *a), (a), meet(UNLINK, a), const char *)
SIMPLE(ftruncate, TRUNCATE, (int fd, off_t size), (fd, size), meet_fd(TRUNCATE, fd), int, off_t)
SIMPLE(ftruncate64, TRUNCATE, (int fd, off64_t size), (fd, size), meet_fd(TRUNCATE, fd), int, off64_t)
