/*
 * What a GPU does between two calls: kernels, copies and fills with their times, as CUPTI records them. llama-driver loads it, for tracer=FILE.
 *
 * It has to be loaded and started before anything makes a CUDA graph: kernels of a graph have records of their own only if CUPTI was on then.
 */
#include <cupti.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPORTED __attribute__((visibility("default")))

struct event {
    uint64_t begin, end; /* ns */
    uint32_t stream, graph;
    char *name;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct event *events;
static size_t count, room;
static int keeping;
static uint64_t dropped;

static void *must_have(void *memory) {
    if (memory == NULL) {
        abort();
    }
    return memory;
}

static void keep(uint64_t begin, uint64_t end, uint32_t stream, uint32_t graph, const char *kind, const char *name, uint64_t bytes) {
    if (count == room) {
        room = 2 * room + 1024;
        events = must_have(realloc(events, room * sizeof *events));
    }
    struct event *event = &events[count++];
    *event = (struct event){.begin = begin, .end = end, .stream = stream, .graph = graph};
    const int length = name != NULL ? asprintf(&event->name, "%s", name) : asprintf(&event->name, "[%s of %llu bytes]", kind, (unsigned long long)bytes);
    if (length < 0) {
        abort();
    }
}

static void keep_record(const CUpti_Activity *record) {
    static const char *const copies[] = {"copy", "copy to the device", "copy to the host"};
    switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const CUpti_ActivityKernel10 *kernel = (const void *)record;
        keep(kernel->start, kernel->end, kernel->streamId, kernel->graphId, "", kernel->name == NULL ? "?" : kernel->name, 0);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const CUpti_ActivityMemcpy6 *copy = (const void *)record;
        keep(copy->start, copy->end, copy->streamId, copy->graphId, copies[copy->copyKind <= 2 ? copy->copyKind : 0], NULL, copy->bytes);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
        const CUpti_ActivityMemset4 *fill = (const void *)record;
        keep(fill->start, fill->end, fill->streamId, fill->graphId, "fill", NULL, fill->bytes);
        break;
    }
    default:
        break;
    }
}

static void CUPTIAPI on_request(uint8_t **buffer, size_t *bytes, size_t *records) {
    *bytes = 4u << 20;
    *records = 0; /* as many as fit */
    *buffer = must_have(aligned_alloc(8, *bytes));
}

static void CUPTIAPI on_complete(CUcontext context, uint32_t stream, uint8_t *buffer, size_t bytes, size_t valid) {
    (void)bytes;
    pthread_mutex_lock(&lock);
    CUpti_Activity *record = NULL;
    while (keeping && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        keep_record(record);
    }
    size_t lost = 0;
    if (cuptiActivityGetNumDroppedRecords(context, stream, &lost) == CUPTI_SUCCESS) {
        dropped += keeping ? lost : 0;
    }
    pthread_mutex_unlock(&lock);
    free(buffer);
}

/* Turns recording on, until the process ends. NULL, or what failed. Called once, before CUDA is used. */
EXPORTED const char *tracer_start(void) {
    const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};
    CUptiResult result = cuptiActivityRegisterCallbacks(on_request, on_complete);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds && result == CUPTI_SUCCESS; ++i) {
        result = cuptiActivityEnable(kinds[i]);
    }
    const char *text = NULL;
    if (result != CUPTI_SUCCESS) {
        cuptiGetResultString(result, &text);
        text = text == NULL ? "CUPTI fails" : text;
    }
    return text;
}

/* Forgets what was recorded. The device has to be idle. */
EXPORTED void tracer_begin(void) {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    pthread_mutex_lock(&lock);
    keeping = 1;
    pthread_mutex_unlock(&lock);
}

/* Appends a line for each record since tracer_begin: label, begin and end in ns, stream, CUDA graph, name, between tabs. The device has to be idle. */
EXPORTED void tracer_end(FILE *file, const char *label) {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; ++i) {
        fprintf(file, "%s\t%llu\t%llu\t%u\t%u\t%s\n", label, (unsigned long long)events[i].begin, (unsigned long long)events[i].end, events[i].stream,
                events[i].graph, events[i].name);
        free(events[i].name);
    }
    if (dropped != 0) {
        fprintf(stderr, "%llu records of the trace were lost\n", (unsigned long long)dropped);
    }
    count = 0;
    dropped = 0;
    keeping = 0;
    pthread_mutex_unlock(&lock);
}
