#include "session.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

namespace vanward {

namespace {

/** libgomp's entry of a parallel region: runs function(data) on each thread of a team and waits for all. */
using GompParallel = void (*)(void (*function)(void *), void *data, unsigned threads, unsigned flags);

/** Finds OpenMP's threads where the process has them; a pool of our own beside them would take the cores that they spin on. */
GompParallel find_team() {
    static GompParallel found = [] {
        void *library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
        return library == nullptr ? nullptr : reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
    }();
    return found;
}

struct Region {
    vwd_task task;
    void *work;
    uint64_t tasks;
    std::atomic<uint64_t> next{0};
};

void run_region(void *data) {
    Region &region = *static_cast<Region *>(data);
    for (uint64_t i; (i = region.next.fetch_add(1, std::memory_order_relaxed)) < region.tasks;) {
        region.task(region.work, i);
    }
}

}  // namespace

bool shares_threads() { return find_team() != nullptr; }

std::string last_error() {
    std::string text(vwd_last_error(nullptr, 0), '\0');
    vwd_last_error(text.data(), text.size() + 1);
    return text;
}

void Session::parallel_for(void *self, uint64_t tasks, vwd_task task, void *work) {
    Region region{task, work, tasks};
    Session &session = *static_cast<Session *>(self);
    const int threads = static_cast<int>(std::min(static_cast<uint64_t>(session.threads_), tasks));
    if (threads <= 1) {
        run_region(&region);
    } else if (GompParallel team = find_team()) {
        team(run_region, &region, static_cast<unsigned>(threads), 0);
    } else {
        session.team_.run(threads, [&] { run_region(&region); });
    }
}

vwd_session *Session::use(int threads, std::string &error) {
    threads_ = threads;
    if (session_ == nullptr) {
        vwd_session_options settings = VWD_SESSION_OPTIONS_INIT;
        settings.device = VWD_DEVICE_CPU;
        settings.parallel_for = parallel_for;
        settings.parallel_context = this;
        if (vwd_session_create(&settings, &session_) != VWD_OK) {
            session_ = nullptr;
            error = last_error();
        }
    }
    return session_;
}

}  // namespace vanward
