/* The wide area network between emulated sites: `forward FD…`, one TUN device a site, in the order of their addresses.
 *
 * A packet leaves through its sender's uplink (rate, bounded queue), travels (delay and random loss of the pair), and
 * arrives through the receiver's downlink (rate, bounded queue). Site i has the address whose last byte is i + 1.
 * Commands are lines on stdin, each answered by one line; the program ends with its stdin. Times are nanoseconds.
 *
 *   site I UP_BITS_S DOWN_BITS_S QUEUE_US   rates (0: no limit) and how long a queue may get
 *   link A B DELAY_US LOSS                  one way, from A to B
 *   cut A B | heal A B                      one way
 *   seed N                                  of the random losses
 *   stat                                    counters, as JSON
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MOST_SITES = 250, MOST_BYTES = 1600, MOST_HELD = 1 << 17 /* 210 MB */, BATCH = 64 };
/* Packets in flight are looked at this often; sleeping between looks, not at each packet, is what makes it cheap. */
static const int64_t TICK_NS = 250000;

typedef struct Packet {
  struct Packet *next; /* of the unused ones */
  uint16_t from, to, bytes;
  uint8_t arrived; /* at the receiver's downlink */
  uint8_t data[MOST_BYTES];
} Packet;

typedef struct {
  int64_t at;
  uint64_t order; /* packets that are due together leave in the order they came */
  Packet *packet;
} Due;

typedef struct {
  int fd;
  double up, down; /* ns a byte */
  int64_t queue_ns, up_free, down_free;
  uint64_t sent, sent_bytes, got, got_bytes, lost, cut, full_up, full_down;
} Site;

typedef struct {
  int64_t delay_ns;
  double loss;
  int cut;
  uint64_t bytes;
} Link;

static Site sites[MOST_SITES];
static Link links[MOST_SITES][MOST_SITES];
static int count;
static Due *heap;
static int held;
static uint64_t order;
static Packet *unused;
static int made;
static uint64_t chance = 88172645463325252ull;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static double draw(void) { /* xorshift64*, in [0, 1) */
  chance ^= chance >> 12, chance ^= chance << 25, chance ^= chance >> 27;
  return (double)((chance * 2685821657736338717ull) >> 11) / 9007199254740992.0;
}

static int before(const Due *a, const Due *b) { return a->at < b->at || (a->at == b->at && a->order < b->order); }

static void push(int64_t at, Packet *packet) {
  Due due = {at, order++, packet};
  int i = held++;
  for (; i && before(&due, &heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
  heap[i] = due;
}

static Due pop(void) {
  Due first = heap[0], last = heap[--held];
  int i = 0;
  for (int child; (child = 2 * i + 1) < held; i = child) {
    if (child + 1 < held && before(&heap[child + 1], &heap[child])) child++;
    if (!before(&heap[child], &last)) break;
    heap[i] = heap[child];
  }
  if (held) heap[i] = last;
  return first;
}

static Packet *take(void) {
  Packet *packet = unused;
  if (packet) unused = packet->next;
  else if (made < MOST_HELD && (packet = malloc(sizeof *packet))) made++;
  return packet;
}

static void give(Packet *packet) { packet->next = unused, unused = packet; }

/* When the last byte has passed a link that is free from `*free_at` on; -1: its queue is full. */
static int64_t through(int64_t at, int64_t *free_at, double ns_a_byte, int64_t queue_ns, int bytes) {
  if (ns_a_byte == 0) return at;
  int64_t start = *free_at > at ? *free_at : at;
  if (start - at > queue_ns) return -1;
  return *free_at = start + (int64_t)(ns_a_byte * bytes);
}

static void leave(Packet *packet, int64_t now) {
  Site *from = &sites[packet->from];
  Link *link = &links[packet->from][packet->to];
  from->sent++, from->sent_bytes += packet->bytes;
  int64_t out = through(now, &from->up_free, from->up, from->queue_ns, packet->bytes);
  if (out < 0) from->full_up++;
  else if (link->cut) from->cut++;
  else if (link->loss > 0 && draw() < link->loss) from->lost++;
  else {
    packet->arrived = 0;
    push(out + link->delay_ns, packet);
    return;
  }
  give(packet);
}

static void arrive(Due due, int64_t now) {
  Packet *packet = due.packet;
  Site *to = &sites[packet->to];
  Link *link = &links[packet->from][packet->to];
  if (link->cut) { /* what was under way is lost too */
    sites[packet->from].cut++;
    give(packet);
    return;
  }
  if (!packet->arrived) {
    int64_t in = through(due.at, &to->down_free, to->down, to->queue_ns, packet->bytes);
    if (in < 0) {
      to->full_down++;
      give(packet);
      return;
    }
    packet->arrived = 1;
    if (in > now) {
      push(in, packet);
      return;
    }
  }
  if (write(to->fd, packet->data, packet->bytes) == packet->bytes) {
    to->got++, to->got_bytes += packet->bytes, link->bytes += packet->bytes;
  } else {
    to->full_down++;
  }
  give(packet);
}

static int read_packets(int from) {
  static uint8_t spilled[MOST_BYTES];
  int found = 0;
  for (; found < BATCH; found++) {
    Packet *packet = take();
    uint8_t *data = packet ? packet->data : spilled;
    ssize_t bytes = read(sites[from].fd, data, MOST_BYTES);
    if (bytes <= 0) {
      if (bytes < 0 && errno == EBADFD) exit(0); /* the device is gone, and with it the network */
      if (packet) give(packet);
      break;
    }
    int to = bytes >= 20 ? data[19] - 1 : -1;
    if (packet && data[0] >> 4 == 4 && to >= 0 && to < count && to != from) {
      packet->from = (uint16_t)from, packet->to = (uint16_t)to, packet->bytes = (uint16_t)bytes;
      leave(packet, now_ns());
      continue;
    }
    if (packet) give(packet);
    else sites[from].full_up++;
  }
  return found;
}

static void tell(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
               (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
  printf("{\"cpu_s\":%.3f,\"held\":%d,\"sites\":[", cpu, held);
  for (int i = 0; i < count; i++) {
    Site *s = &sites[i];
    printf("%s[%llu,%llu,%llu,%llu,%llu,%llu,%llu,%llu]", i ? "," : "", (unsigned long long)s->sent,
           (unsigned long long)s->sent_bytes, (unsigned long long)s->got, (unsigned long long)s->got_bytes,
           (unsigned long long)s->lost, (unsigned long long)s->cut, (unsigned long long)s->full_up,
           (unsigned long long)s->full_down);
  }
  printf("],\"pairs\":[");
  for (int a = 0, first = 1; a < count; a++)
    for (int b = 0; b < count; b++)
      if (links[a][b].bytes) {
        printf("%s[%d,%d,%llu]", first ? "" : ",", a, b, (unsigned long long)links[a][b].bytes);
        first = 0;
      }
  printf("]}\n");
}

static int known(int i) { return i >= 0 && i < count; }

static void obey(char *line) {
  int a, b;
  long long up, down, queue, delay;
  unsigned long long seed;
  double loss;
  if (!strcmp(line, "stat")) tell();
  else if (sscanf(line, "site %d %lld %lld %lld", &a, &up, &down, &queue) == 4 && known(a)) {
    sites[a].up = up ? 8e9 / (double)up : 0, sites[a].down = down ? 8e9 / (double)down : 0;
    sites[a].queue_ns = queue * 1000;
    puts("ok");
  } else if (sscanf(line, "link %d %d %lld %lf", &a, &b, &delay, &loss) == 4 && known(a) && known(b)) {
    links[a][b].delay_ns = delay * 1000, links[a][b].loss = loss;
    puts("ok");
  } else if (sscanf(line, "cut %d %d", &a, &b) == 2 && known(a) && known(b)) {
    links[a][b].cut = 1;
    puts("ok");
  } else if (sscanf(line, "heal %d %d", &a, &b) == 2 && known(a) && known(b)) {
    links[a][b].cut = 0;
    puts("ok");
  } else if (sscanf(line, "seed %llu", &seed) == 1) {
    chance = seed ? seed : 1;
    puts("ok");
  } else {
    printf("error: %s\n", line);
  }
}

/* 0 when there will be no more commands. */
static int read_commands(void) {
  static char line[4096];
  static size_t have;
  ssize_t bytes = read(0, line + have, sizeof line - have - 1);
  if (bytes <= 0) return bytes < 0 && (errno == EINTR || errno == EAGAIN);
  have += (size_t)bytes;
  line[have] = 0;
  char *end, *at = line;
  for (; (end = strchr(at, '\n')); at = end + 1) *end = 0, obey(at);
  have -= (size_t)(at - line);
  memmove(line, at, have);
  fflush(stdout);
  return have < sizeof line - 1;
}

int main(int argc, char **argv) {
  struct pollfd polled[MOST_SITES + 1];
  count = argc - 1;
  if (count < 1 || count > MOST_SITES || !(heap = malloc(sizeof *heap * MOST_HELD))) return 2;
  for (int i = 0; i < count; i++) {
    sites[i].fd = atoi(argv[i + 1]);
    polled[i] = (struct pollfd){sites[i].fd, POLLIN, 0};
  }
  polled[count] = (struct pollfd){0, POLLIN, 0};
  prctl(PR_SET_TIMERSLACK, 20000);
  puts("ready");
  fflush(stdout);
  for (int64_t told = 0;;) {
    int64_t now = now_ns(), wait = 1000000000;
    while (held && heap[0].at <= now) arrive(pop(), now);
    if (held) wait = heap[0].at - now;
    int quiet = wait > 4 * TICK_NS;
    struct timespec pause = {0, quiet ? (wait < 999999999 ? wait : 999999999) : TICK_NS};
    if (quiet) ppoll(polled, (nfds_t)count + 1, &pause, NULL); /* few packets: wake for the next one */
    else nanosleep(&pause, NULL);                              /* many: collect them */
    for (int i = 0; i < count; i++)
      for (int more = 8; more && read_packets(i) == BATCH; more--) {} /* nobody's flood holds up the others */
    now = now_ns();
    if (quiet || now - told > 10000000) {
      struct pollfd commands = {0, POLLIN, 0};
      told = now;
      if (poll(&commands, 1, 0) > 0 && !read_commands()) return 0;
    }
  }
}
