#include "session.h"

#include <dlfcn.h>

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

std::string last_error() {
    std::string text(vwd_last_error(nullptr, 0), '\0');
    vwd_last_error(text.data(), text.size() + 1);
    return text;
}

void Session::parallel_for(void *self, uint64_t tasks, vwd_task task, void *work) {
    Region region{task, work, tasks};
    uint64_t threads = static_cast<uint64_t>(static_cast<Session *>(self)->shared_threads_);
    threads = threads < tasks ? threads : tasks;
    if (threads <= 1) {
        run_region(&region);
    } else {
        find_team()(run_region, &region, static_cast<unsigned>(threads), 0);
    }
}

vwd_session *Session::use(int threads, std::string &error) {
    const bool shares = find_team() != nullptr;
    shared_threads_ = threads;
    if (session_ != nullptr && (shares || threads == threads_)) {
        return session_;
    }
    vwd_session_release(session_);
    session_ = nullptr;
    vwd_session_options settings = VWD_SESSION_OPTIONS_INIT;
    settings.device = VWD_DEVICE_CPU;
    if (shares) {
        settings.parallel_for = parallel_for;
        settings.parallel_context = this;
    } else {
        settings.threads = static_cast<uint32_t>(threads);
    }
    if (vwd_session_create(&settings, &session_) != VWD_OK) {
        session_ = nullptr;
        error = last_error();
    }
    threads_ = threads;
    return session_;
}

}  // namespace vanward
