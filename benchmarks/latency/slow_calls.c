/* Preloaded into a process, makes every call that concerns a file below $SLOW_UNDER take $SLOW_MS longer: a file system
   whose other end is far away. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void late(const char *path) {
    const char *under = getenv("SLOW_UNDER"), *ms = getenv("SLOW_MS");
    if (!under || !ms || !path || strncmp(path, under, strlen(under))) return;
    long ns = atol(ms) * 1000000L;
    struct timespec t = {ns / 1000000000L, ns % 1000000000L};
    nanosleep(&t, NULL);
}

static void late_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n > 0) { path[n] = 0; late(path); }
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)

static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }

int open64(const char *path, int flags, ...) {
    va_list more; va_start(more, flags); mode_t mode = mode_of(flags, more); va_end(more);
    REAL(int, "open64", const char *, int, ...); late(path); return real(path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
    va_list more; va_start(more, flags); mode_t mode = mode_of(flags, more); va_end(more);
    REAL(int, "openat64", int, const char *, int, ...); late(path); return real(at, path, flags, mode);
}
int stat64(const char *path, struct stat64 *s) { REAL(int, "stat64", const char *, struct stat64 *); late(path); return real(path, s); }
int fstatat64(int at, const char *path, struct stat64 *s, int flags) {
    REAL(int, "fstatat64", int, const char *, struct stat64 *, int); late(path); return real(at, path, s, flags);
}
int fstat64(int fd, struct stat64 *s) { REAL(int, "fstat64", int, struct stat64 *); late_fd(fd); return real(fd, s); }
ssize_t write(int fd, const void *b, size_t n) { REAL(ssize_t, "write", int, const void *, size_t); late_fd(fd); return real(fd, b, n); }
ssize_t read(int fd, void *b, size_t n) { REAL(ssize_t, "read", int, void *, size_t); late_fd(fd); return real(fd, b, n); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t); late_fd(fd); return real(fd, b, n, o); }
ssize_t pread64(int fd, void *b, size_t n, off64_t o) { REAL(ssize_t, "pread64", int, void *, size_t, off64_t); late_fd(fd); return real(fd, b, n, o); }
int rename(const char *a, const char *b) { REAL(int, "rename", const char *, const char *); late(a); return real(a, b); }
int renameat(int x, const char *a, int y, const char *b) { REAL(int, "renameat", int, const char *, int, const char *); late(a); return real(x, a, y, b); }
int unlink(const char *path) { REAL(int, "unlink", const char *); late(path); return real(path); }
int mkdir(const char *path, mode_t m) { REAL(int, "mkdir", const char *, mode_t); late(path); return real(path, m); }
int flock(int fd, int how) { REAL(int, "flock", int, int); late_fd(fd); return real(fd, how); }
