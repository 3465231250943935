#include "team.h"

#include <system_error>

namespace vanward {

Team::~Team() {
    {
        std::lock_guard<std::mutex> guard(mutex_);
        closes_ = true;
    }
    begun_.notify_all();
    for (std::thread &thread : threads_) {
        thread.join();
    }
}

void Team::run(int threads, const std::function<void()> &work) {
    const int others = threads - 1;
    try {
        while (static_cast<int>(threads_.size()) < others) {
            threads_.emplace_back([this] { wait_for_work(); });
        }
    } catch (const std::system_error &) {  // those that are there do the work
    }
    {
        std::lock_guard<std::mutex> guard(mutex_);
        work_ = &work;
        places_ = others;
    }
    for (int i = 0; i < others; ++i) {
        begun_.notify_one();
    }
    work();
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = nullptr;
    ended_.wait(lock, [&] { return running_ == 0; });
}

void Team::wait_for_work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        begun_.wait(lock, [&] { return closes_ || (work_ != nullptr && places_ > 0); });
        if (closes_) {
            return;
        }
        const std::function<void()> &work = *work_;
        places_ -= 1;
        running_ += 1;
        lock.unlock();
        work();
        lock.lock();
        running_ -= 1;
        if (running_ == 0) {
            ended_.notify_one();
        }
    }
}

}  // namespace vanward
