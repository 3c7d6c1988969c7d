/* A stand-in for libnvidia-ml.so.1: NVML's own calls, structs and error numbers, with readings from a text file that a test rewrites.

   HOLTER_TESTING_NVML names the file, which is read again at every call. A line is a device's number (or `*`), a key and a value:

       * init_error 0            what nvmlInit returns
       0 uuid GPU-aaaa           every device needs one; further keys are those of `struct gpu` below
       0 error 15                every call about this device returns it: it is lost
       0 error.nvmlDeviceGetPowerUsage 3
       0 hang.nvmlDeviceGetTemperature 5
       0 xid 79                  an event; those that were there when a set was registered are not delivered
       0 mig MIG-bbbb 1 0        a MIG device in it: its UUID, GPU instance and compute instance

   As in the real library nothing can be asked before nvmlInit, power is in milliwatts, and times of violations are in nanoseconds. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, TIMED_OUT = 10,
       NO_FUNCTION = 13, LOST = 15, WRONG_VERSION = 25 };
enum { MAX_GPUS = 8, MAX_KEYS = 48, MAX_EVENTS = 256, MAX_MIG = 8, MAX_SETS = 32 };
enum { XID_EVENT = 8, MEMORY_V2 = 0x02000028 };

typedef struct { char key[96]; char value[128]; } pair_t;
typedef struct { char uuid[128]; unsigned gi, ci; int parent; } mig_t;
typedef struct { int kind; int index; int mig; } handle_t;             /* what a nvmlDevice_t points to */
typedef struct { pair_t pairs[MAX_KEYS]; int num_pairs; mig_t migs[MAX_MIG]; int num_migs; uint64_t events[MAX_EVENTS]; int num_events; } gpu_t;
typedef struct { int is_used; int is_registered[MAX_GPUS]; int num_seen[MAX_GPUS]; } set_t;

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned long long reference, violation; } violation_t;
typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; signed long long sll; } value_t;
typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type; unsigned result; value_t value; } field_t;
typedef struct { handle_t *device; unsigned long long type, data; unsigned gi, ci; } event_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int num_inits = 0;
/* A copy for each thread: one may read the file anew while another still answers. */
static __thread gpu_t gpus[MAX_GPUS];
static __thread pair_t general[MAX_KEYS];
static __thread int num_general, num_gpus;
static handle_t handles[MAX_GPUS], mig_handles[MAX_GPUS][MAX_MIG];
static set_t sets[MAX_SETS];

static void put(pair_t *pairs, int *number, const char *key, const char *value) {
    for (int i = 0; i < *number; i++)
        if (!strcmp(pairs[i].key, key)) { snprintf(pairs[i].value, sizeof pairs[i].value, "%s", value); return; }
    if (*number >= MAX_KEYS) return;
    snprintf(pairs[*number].key, sizeof pairs[0].key, "%s", key);
    snprintf(pairs[(*number)++].value, sizeof pairs[0].value, "%s", value);
}

static void load(void) {
    const char *path = getenv("HOLTER_TESTING_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], who[16], key[96], value[128], gi[16], ci[16];
    if (!file) return;
    memset(gpus, 0, sizeof gpus);
    num_general = num_gpus = 0;
    while (fgets(line, sizeof line, file)) {
        gi[0] = ci[0] = 0;
        if (sscanf(line, "%15s %95s %127s %15s %15s", who, key, value, gi, ci) < 3 || who[0] == '#') continue;
        if (who[0] == '*') { put(general, &num_general, key, value); continue; }
        int index = atoi(who);
        if (index < 0 || index >= MAX_GPUS) continue;
        gpu_t *gpu = &gpus[index];
        if (index >= num_gpus) num_gpus = index + 1;
        if (!strcmp(key, "xid") && gpu->num_events < MAX_EVENTS) gpu->events[gpu->num_events++] = strtoull(value, NULL, 10);
        else if (!strcmp(key, "mig") && gpu->num_migs < MAX_MIG) {
            mig_t *mig = &gpu->migs[gpu->num_migs++];
            snprintf(mig->uuid, sizeof mig->uuid, "%s", value);
            mig->gi = (unsigned)atoi(gi), mig->ci = (unsigned)atoi(ci), mig->parent = index;
        } else put(gpu->pairs, &gpu->num_pairs, key, value);
    }
    fclose(file);
}

static const char *text(const pair_t *pairs, int number, const char *key) {
    for (int i = 0; i < number; i++) if (!strcmp(pairs[i].key, key)) return pairs[i].value;
    return NULL;
}

static int has(int index, const char *key) { return text(gpus[index].pairs, gpus[index].num_pairs, key) != NULL; }

static unsigned long long number(int index, const char *key, unsigned long long usual) {
    const char *found = text(gpus[index].pairs, gpus[index].num_pairs, key);
    return found ? strtoull(found, NULL, 0) : usual;
}

/* Every call begins here: reads the file, waits if it is told to, and says what is wrong. */
static int enter(const char *name, const handle_t *device) {
    char key[96];
    pthread_mutex_lock(&lock);
    load();
    int code = num_inits ? OK : UNINITIALIZED;
    unsigned hang = 0;
    if (!code && device) {
        if (device->index < 0 || device->index >= num_gpus) code = INVALID;
        else {
            snprintf(key, sizeof key, "hang.%s", name);
            hang = (unsigned)number(device->index, key, 0);
            snprintf(key, sizeof key, "error.%s", name);
            code = (int)number(device->index, key, number(device->index, "error", 0));
        }
    } else if (!code) {
        snprintf(key, sizeof key, "error.%s", name);
        const char *found = text(general, num_general, key);
        code = found ? atoi(found) : OK;
    }
    pthread_mutex_unlock(&lock);
    if (hang) sleep(hang);
    return code;
}
#define ENTER(device) int code = enter(__func__, device); if (code) return code
#define NEED(pointer) if (!(pointer)) return INVALID

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    load();
    const char *found = text(general, num_general, "init_error");
    int code = found ? atoi(found) : OK;
    if (!code) num_inits++;
    for (int i = 0; i < MAX_GPUS; i++) {
        handles[i] = (handle_t){0, i, -1};
        for (int j = 0; j < MAX_MIG; j++) mig_handles[i][j] = (handle_t){1, i, j};
    }
    pthread_mutex_unlock(&lock);
    return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { if (!num_inits) return UNINITIALIZED; num_inits--; return OK; }

const char *nvmlErrorString(int code) {
    static const char *const texts[] = {"Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout",
        "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost",
        "GPU requires reset", "The operating system has blocked the request"};
    return code >= 0 && code < (int)(sizeof texts / sizeof *texts) ? texts[code] : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER(NULL); NEED(version);
    return (unsigned)snprintf(version, length, "550.54.15") >= length ? TOO_SMALL : OK;
}
int nvmlDeviceGetCount_v2(unsigned *count) { ENTER(NULL); NEED(count); *count = (unsigned)num_gpus; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle_t **device) {
    ENTER(NULL); NEED(device);
    if (index >= (unsigned)num_gpus) return INVALID;
    *device = &handles[index];
    return (int)number((int)index, "error", 0) == LOST ? LOST : OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, handle_t **device) {
    ENTER(NULL); NEED(uuid && device);
    for (int i = 0; i < num_gpus; i++) {
        const char *own = text(gpus[i].pairs, gpus[i].num_pairs, "uuid");
        if (own && !strcmp(own, uuid)) { *device = &handles[i]; return (int)number(i, "error", 0) == LOST ? LOST : OK; }
        for (int j = 0; j < gpus[i].num_migs; j++)
            if (!strcmp(gpus[i].migs[j].uuid, uuid)) { *device = &mig_handles[i][j]; return OK; }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(handle_t *device, char *uuid, unsigned length) {
    ENTER(device); NEED(device && uuid);
    const char *own = device->kind ? gpus[device->index].migs[device->mig].uuid : text(gpus[device->index].pairs, gpus[device->index].num_pairs, "uuid");
    if (!own) return UNSUPPORTED;
    return (unsigned)snprintf(uuid, length, "%s", own) >= length ? TOO_SMALL : OK;
}
int nvmlDeviceGetName(handle_t *device, char *name, unsigned length) {
    ENTER(device); NEED(device && name);
    return (unsigned)snprintf(name, length, "NVIDIA Stand-in") >= length ? TOO_SMALL : OK;
}
int nvmlDeviceGetIndex(handle_t *device, unsigned *index) {
    ENTER(device); NEED(device && index);
    if (device->kind) return UNSUPPORTED;
    *index = (unsigned)device->index;
    return OK;
}
int nvmlDeviceGetPciInfo_v3(handle_t *device, pci_t *pci) {
    ENTER(device); NEED(device && pci);
    if (device->kind) return UNSUPPORTED;
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)number(device->index, "pci_bus", 0x3b + (unsigned)device->index);
    snprintf(pci->legacy, sizeof pci->legacy, "%04X:%02X:%02X.0", 0, pci->bus, 0);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", 0, pci->bus, 0);
    return OK;
}

/* One number each; a MIG device has its parent's heat and errors through the parent alone, as with the real one. */
#define TELLS(function, type, key, usual) \
    int function(handle_t *device, type *value) { \
        ENTER(device); NEED(device && value); \
        if (device->kind) return UNSUPPORTED; \
        *value = (type)number(device->index, key, usual); \
        return OK; \
    }
TELLS(nvmlDeviceGetPowerUsage, unsigned, "power_mw", 350000)
TELLS(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit_mw", 700000)
TELLS(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "reasons", 0)
TELLS(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "reasons", 0)
TELLS(nvmlDeviceGetSupportedEventTypes, unsigned long long, "events", 0x1f)
TELLS(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, "retirement_pending", 0)
TELLS(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie_replays", 0)

int nvmlDeviceGetClockInfo(handle_t *device, unsigned type, unsigned *clock) {
    ENTER(device); NEED(device && clock);
    if (type > 3) return INVALID;
    *clock = (unsigned)number(device->index, "clock", 1980);
    return OK;
}
int nvmlDeviceGetMaxClockInfo(handle_t *device, unsigned type, unsigned *clock) {
    ENTER(device); NEED(device && clock);
    if (type > 3) return INVALID;
    *clock = (unsigned)number(device->index, "max_clock", 1980);
    return OK;
}
int nvmlDeviceGetTemperature(handle_t *device, unsigned sensor, unsigned *celsius) {
    ENTER(device); NEED(device && celsius);
    if (sensor != 0) return INVALID;
    if (device->kind) return UNSUPPORTED;
    *celsius = (unsigned)number(device->index, "temperature", 55);
    return OK;
}
int nvmlDeviceGetMemoryInfo(handle_t *device, memory_t *memory) {
    ENTER(device); NEED(device && memory);
    memory->total = number(device->index, "memory_total", 80ULL << 30);
    memory->used = number(device->index, "memory_used", 20ULL << 30);
    memory->free = memory->total - memory->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(handle_t *device, memory_v2_t *memory) {
    ENTER(device); NEED(device && memory);
    if (memory->version != MEMORY_V2) return WRONG_VERSION;
    memory->total = number(device->index, "memory_total", 80ULL << 30);
    memory->used = number(device->index, "memory_used", 20ULL << 30);
    memory->reserved = number(device->index, "memory_reserved", 0);
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}
static const char *ecc_key(unsigned type, unsigned counter) {
    static const char *const keys[2][2] = {{"ecc_corrected", "ecc_corrected_lifetime"}, {"ecc_uncorrected", "ecc_uncorrected_lifetime"}};
    return type > 1 || counter > 1 ? NULL : keys[type][counter];
}
int nvmlDeviceGetTotalEccErrors(handle_t *device, unsigned type, unsigned counter, unsigned long long *count) {
    ENTER(device); NEED(device && count && ecc_key(type, counter));
    if (device->kind || number(device->index, "no_ecc", 0)) return UNSUPPORTED;
    *count = number(device->index, ecc_key(type, counter), 0);
    return OK;
}
int nvmlDeviceGetMemoryErrorCounter(handle_t *device, unsigned type, unsigned counter, unsigned location, unsigned long long *count) {
    ENTER(device); NEED(device && count && ecc_key(type, counter));
    if (device->kind || number(device->index, "no_ecc", 0)) return UNSUPPORTED;
    *count = location == 2 ? number(device->index, ecc_key(type, counter), 0) : 0;
    return OK;
}
int nvmlDeviceGetRemappedRows(handle_t *device, unsigned *corrected, unsigned *uncorrected, unsigned *is_pending, unsigned *has_failed) {
    ENTER(device); NEED(device && corrected && uncorrected && is_pending && has_failed);
    if (device->kind || number(device->index, "no_rows", 0)) return UNSUPPORTED;
    *corrected = (unsigned)number(device->index, "rows_corrected", 0);
    *uncorrected = (unsigned)number(device->index, "rows_uncorrected", 0);
    *is_pending = (unsigned)number(device->index, "remap_pending", 0);
    *has_failed = (unsigned)number(device->index, "remap_failed", 0);
    return OK;
}
int nvmlDeviceGetRetiredPages(handle_t *device, unsigned cause, unsigned *count, unsigned long long *pages) {
    ENTER(device); NEED(device && count);
    if (cause > 1) return INVALID;
    unsigned long long found = number(device->index, cause ? "retired_double" : "retired_single", 0);
    if (!found && !has(device->index, "retired_double") && !has(device->index, "retired_single")) return UNSUPPORTED;
    if (*count < found) { *count = (unsigned)found; return TOO_SMALL; }
    for (unsigned i = 0; i < found; i++) { NEED(pages); pages[i] = 0x1000ULL * i; }
    *count = (unsigned)found;
    return OK;
}
int nvmlDeviceGetViolationStatus(handle_t *device, unsigned policy, violation_t *told) {
    ENTER(device); NEED(device && told);
    if (policy > 1) return UNSUPPORTED;
    told->reference = (unsigned long long)time(NULL) * 1000000ULL;
    told->violation = number(device->index, policy ? "thermal_ns" : "power_ns", 0);
    return OK;
}
int nvmlDeviceGetNvLinkState(handle_t *device, unsigned link, unsigned *is_active) {
    ENTER(device); NEED(device && is_active);
    if (link >= 36) return INVALID;
    if (link >= number(device->index, "nvlinks", 0)) return UNSUPPORTED;
    *is_active = link < number(device->index, "nvlinks_active", number(device->index, "nvlinks", 0));
    return OK;
}
int nvmlDeviceGetNvLinkErrorCounter(handle_t *device, unsigned link, unsigned counter, unsigned long long *count) {
    static const char *const keys[] = {"nvlink_replays", "nvlink_recoveries", "nvlink_crc", "nvlink_crc_data", "nvlink_ecc"};
    ENTER(device); NEED(device && count);
    if (counter > 4) return INVALID;
    if (link >= number(device->index, "nvlinks", 0)) return UNSUPPORTED;
    *count = link ? 0 : number(device->index, keys[counter], 0);
    return OK;
}

static int field(int index, unsigned id, field_t *told) {
    static const struct { unsigned id; const char *key; } fields[] = {
        {3, "ecc_corrected"}, {4, "ecc_uncorrected"}, {5, "ecc_corrected_lifetime"}, {6, "ecc_uncorrected_lifetime"}, {31, "retirement_pending"},
        {38, "nvlink_crc"}, {45, "nvlink_crc_data"}, {52, "nvlink_replays"}, {59, "nvlink_recoveries"}, {160, "nvlink_ecc"},
        {74, "power_ns"}, {75, "thermal_ns"}, {94, "pcie_replays"},
        {142, "rows_corrected"}, {143, "rows_uncorrected"}, {144, "remap_pending"}, {145, "remap_failed"}, {230, "recovery_action"}};
    for (unsigned i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].id == id) {
            int is_link = !strncmp(fields[i].key, "nvlink", 6);
            if (is_link && (!number(index, "nvlinks", 0) || number(index, "no_link_fields", 0))) return UNSUPPORTED;
            if ((id == 230 && !has(index, "recovery_action")) || number(index, "no_fields", 0)) return UNSUPPORTED;
            told->type = 3;
            told->value.ull = number(index, fields[i].key, 0);
            return OK;
        }
    return INVALID;
}
int nvmlDeviceGetFieldValues(handle_t *device, int count, field_t *fields) {
    ENTER(device); NEED(device && fields && count > 0);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp = (long long)time(NULL) * 1000000;
        fields[i].result = (unsigned)field(device->index, fields[i].field, &fields[i]);
    }
    return OK;
}

int nvmlDeviceGetMigMode(handle_t *device, unsigned *current, unsigned *pending) {
    ENTER(device); NEED(device && current && pending);
    *current = *pending = gpus[device->index].num_migs > 0;
    return OK;
}
int nvmlDeviceIsMigDeviceHandle(handle_t *device, unsigned *is_mig) { ENTER(device); NEED(device && is_mig); *is_mig = (unsigned)device->kind; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(handle_t *device, unsigned *count) { ENTER(device); NEED(device && count); *count = MAX_MIG; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(handle_t *device, unsigned index, handle_t **mig) {
    ENTER(device); NEED(device && mig);
    if (index >= MAX_MIG) return INVALID;
    if (index >= (unsigned)gpus[device->index].num_migs) return NOT_FOUND;
    *mig = &mig_handles[device->index][index];
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle_t *mig, handle_t **device) {
    ENTER(mig); NEED(mig && device);
    if (!mig->kind) return INVALID;
    *device = &handles[mig->index];
    return OK;
}
int nvmlDeviceGetGpuInstanceId(handle_t *mig, unsigned *id) {
    ENTER(mig); NEED(mig && id);
    if (!mig->kind) return INVALID;
    *id = gpus[mig->index].migs[mig->mig].gi;
    return OK;
}

int nvmlEventSetCreate(set_t **set) {
    ENTER(NULL); NEED(set);
    for (int i = 0; i < MAX_SETS; i++)
        if (!sets[i].is_used) { memset(&sets[i], 0, sizeof sets[i]); sets[i].is_used = 1; *set = &sets[i]; return OK; }
    return 20;
}
int nvmlEventSetFree(set_t *set) { ENTER(NULL); NEED(set); set->is_used = 0; return OK; }
int nvmlDeviceRegisterEvents(handle_t *device, unsigned long long types, set_t *set) {
    ENTER(device); NEED(device && set);
    if (device->kind || types & ~number(device->index, "events", 0x1f)) return UNSUPPORTED;
    set->is_registered[device->index] = 1;
    set->num_seen[device->index] = gpus[device->index].num_events;
    return OK;
}
int nvmlEventSetWait_v2(set_t *set, event_t *event, unsigned timeout_ms) {
    for (unsigned waited = 0;; waited += 20) {
        ENTER(NULL); NEED(set && event);
        for (int i = 0; i < num_gpus; i++) {
            if (!set->is_registered[i]) continue;
            if (set->num_seen[i] < gpus[i].num_events) {
                *event = (event_t){&handles[i], XID_EVENT, gpus[i].events[set->num_seen[i]++], 0xffffffffu, 0xffffffffu};
                event->gi = (unsigned)number(i, "event_gi", 0xffffffffu);
                return OK;
            }
            if (number(i, "error", 0) == LOST) return LOST;
        }
        if (waited >= timeout_ms) return TIMED_OUT;
        usleep(20000);
    }
}
