// Threads that wait asleep, for a process whose ggml has threads that nobody else can use.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace vanward {

/**
 * The caller and some threads beside it. None of them spins or yields while it waits: ggml's threads spin, and what keeps a core from
 * them delays every one of their barriers.
 */
class Team {
  public:
    Team() = default;
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;
    ~Team();

    /**
     * Runs `work` on the caller and on up to `threads` − 1 others, and returns when all that began it have ended. A thread that wakes up
     * after the caller has ended does not begin. Where the system refuses a thread, there are fewer. Called by one thread at a time.
     */
    void run(int threads, const std::function<void()> &work);

  private:
    void wait_for_work();

    std::mutex mutex_;
    std::condition_variable begun_, ended_;
    std::vector<std::thread> threads_;
    const std::function<void()> *work_ = nullptr;  ///< what a thread may begin
    int places_ = 0;                               ///< how many may still begin it
    int running_ = 0;
    bool closes_ = false;
};

}  // namespace vanward
