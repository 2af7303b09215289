/* Counts the calls by which a process and its children change a folder, and ends them all, as by SIGKILL, at a chosen
   one: what `ckptool prove -- COMMAND` preloads (LD_PRELOAD). It shares one page file with ckptool, which reads the
   counts and sets the place. Blind to mmap, to io_uring, to statically linked programs and inside C's own stdio. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, WRITE, HALF, RENAME, UNLINK, FSYNC, TRUNCATE, MKDIR };

#define LOG (1 << 20)
struct shared {                  /* as `Watch` in __init__.py has it */
    int64_t total, from;         /* events so far; the one from which on it may end (< 0: never) */
    int32_t kind, dead, group;   /* the kind that it ends at (< 0: any) */
    int32_t noted, size;         /* bytes of `outside`; log2 of the least write that counts where it ends at one */
    char folder[4096];
    char outside[8192];          /* files opened for writing elsewhere, a line each */
    uint8_t log[LOG];            /* kind | log2 of the bytes << 3 */
};

static struct shared *s;

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void die(void) {
    s->dead = 1;
    if (s->group) kill(-s->group, SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CKPTOOL_PROVE_EVENTS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return;
    s = at;
    if (!s->group) s->group = getpgrp();
    if (s->dead) die();
}

static int log2_of(size_t bytes) {
    int n = 0;
    while (bytes >>= 1) n++;
    return n > 31 ? 31 : n;
}

/* True where it is time to die. */
static int hit(int kind, size_t bytes) {
    if (s->dead) die();
    int64_t n = __atomic_fetch_add(&s->total, 1, __ATOMIC_SEQ_CST);
    int size = log2_of(bytes);
    if (n < LOG) s->log[n] = (uint8_t)(kind | size << 3);
    if (s->from < 0 || n < s->from || (s->kind >= 0 && s->kind != kind)) return 0;
    return s->kind < 0 || (kind != WRITE && kind != HALF) || size >= s->size;
}

static void event(int kind) { if (hit(kind, 0)) die(); }

static int below(const char *path) {
    size_t n = strlen(s->folder);
    return !strncmp(path, s->folder, n) && (!path[n] || path[n] == '/');
}

static int of_fd(int fd, char *path) {
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
    return n > 0 && path[0] == '/';
}

static int fd_below(int fd) {
    char path[PATH_MAX];
    return s && of_fd(fd, path) && below(path);
}

/* Resolves the folder that a name is in, not the name: that is what is made, renamed or removed. */
static int resolve(int at, const char *name, char *path) {
    char full[2 * PATH_MAX + 2], base[PATH_MAX] = "";
    if (!name || !*name || strlen(name) >= PATH_MAX) return 0;
    if (*name != '/' && !(at == AT_FDCWD ? getcwd(base, sizeof base) != NULL : of_fd(at, base))) return 0;
    snprintf(full, sizeof full, "%s/%s", base, name);
    char *end = full + strlen(full);
    while (end > full + 1 && end[-1] == '/') *--end = 0;
    char *slash = strrchr(full, '/');
    *slash = 0;
    if (!realpath(*full ? full : "/", path)) return 0;
    size_t n = strlen(path);
    snprintf(path + n, PATH_MAX - n, "/%s", slash + 1);
    return 1;
}

static int path_below(int at, const char *name) {
    char path[PATH_MAX];
    return s && resolve(at, name, path) && below(path);
}

static void opening(int at, const char *name) {
    char path[PATH_MAX];
    if (!s || !resolve(at, name, path)) return;
    if (below(path)) { event(OPEN); return; }
    if (!strncmp(path, "/dev/", 5) || !strncmp(path, "/proc/", 6) || strstr(path, "__pycache__")) return;
    int n = (int)strlen(path) + 1, from = __atomic_fetch_add(&s->noted, n, __ATOMIC_SEQ_CST);
    if (from + n <= (int)sizeof s->outside) { memcpy(s->outside + from, path, n - 1); s->outside[from + n - 1] = '\n'; }
}

#define CHANGES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)
#define MODE int mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list v; va_start(v, flags); mode = va_arg(v, int); va_end(v); }
#define OPENS(name) int name(const char *path, int flags, ...) { \
    REAL(name); MODE if (flags & CHANGES) opening(AT_FDCWD, path); return real(path, flags, mode); }
#define OPENATS(name) int name(int at, const char *path, int flags, ...) { \
    REAL(name); MODE if (flags & CHANGES) opening(at, path); return real(at, path, flags, mode); }
#define CREATS(name) int name(const char *path, mode_t mode) { \
    REAL(name); opening(AT_FDCWD, path); return real(path, mode); }
#define FOPENS(name) FILE *name(const char *path, const char *how) { \
    REAL(name); if (strpbrk(how, "wa+")) opening(AT_FDCWD, path); return real(path, how); }
OPENS(open) OPENS(open64) OPENATS(openat) OPENATS(openat64) CREATS(creat) CREATS(creat64) FOPENS(fopen) FOPENS(fopen64)

#define WRITES(name, parameters, arguments, half) ssize_t name parameters { \
    REAL(name); \
    if (n > 0 && fd_below(fd)) { \
        if (hit(WRITE, bytes)) die(); \
        if (bytes > 1 && hit(HALF, bytes)) { if (half < 0) { } die(); } \
    } \
    return real arguments; }
#define bytes ((size_t)n)
WRITES(write, (int fd, const void *data, size_t n), (fd, data, n), real(fd, data, n / 2))
WRITES(pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at), real(fd, data, n / 2, at))
WRITES(pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at), real(fd, data, n / 2, at))
#undef bytes
static size_t sum(const struct iovec *v, int n) { size_t all = 0; while (n--) all += v++->iov_len; return all; }
static const struct iovec *half_of(const struct iovec *v, int n) {
    static __thread struct iovec one;
    while (n > 1 && !v->iov_len) v++, n--;
    one = *v;
    if (n == 1) one.iov_len /= 2;
    return &one;
}
#define bytes sum(v, n)
WRITES(writev, (int fd, const struct iovec *v, int n), (fd, v, n), real(fd, half_of(v, n), 1))
WRITES(pwritev, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at), real(fd, half_of(v, n), 1, at))
#undef bytes

#define CALL(type, name, parameters, arguments, kind, about) type name parameters { \
    REAL(name); if (about) event(kind); return real arguments; }
#define PATH const char *path
#define TWO const char *from, const char *path
CALL(int, rename, (TWO), (from, path), RENAME, path_below(AT_FDCWD, path))
CALL(int, renameat, (int a, const char *from, int b, PATH), (a, from, b, path), RENAME, path_below(b, path))
CALL(int, renameat2, (int a, const char *from, int b, PATH, unsigned f), (a, from, b, path, f), RENAME, path_below(b, path))
CALL(int, link, (TWO), (from, path), RENAME, path_below(AT_FDCWD, path))
CALL(int, linkat, (int a, const char *from, int b, PATH, int f), (a, from, b, path, f), RENAME, path_below(b, path))
CALL(int, unlink, (PATH), (path), UNLINK, path_below(AT_FDCWD, path))
CALL(int, unlinkat, (int a, PATH, int f), (a, path, f), UNLINK, path_below(a, path))
CALL(int, remove, (PATH), (path), UNLINK, path_below(AT_FDCWD, path))
CALL(int, rmdir, (PATH), (path), UNLINK, path_below(AT_FDCWD, path))
CALL(int, mkdir, (PATH, mode_t m), (path, m), MKDIR, path_below(AT_FDCWD, path))
CALL(int, mkdirat, (int a, PATH, mode_t m), (a, path, m), MKDIR, path_below(a, path))
CALL(int, fsync, (int fd), (fd), FSYNC, fd_below(fd))
CALL(int, fdatasync, (int fd), (fd), FSYNC, fd_below(fd))
CALL(int, ftruncate, (int fd, off_t n), (fd, n), TRUNCATE, fd_below(fd))
CALL(int, ftruncate64, (int fd, off64_t n), (fd, n), TRUNCATE, fd_below(fd))
CALL(int, truncate, (PATH, off_t n), (path, n), TRUNCATE, path_below(AT_FDCWD, path))
