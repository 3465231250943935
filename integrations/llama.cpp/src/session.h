// Vanward's session of one llama.cpp context, and the threads that it computes on.
#pragma once

#include "team.h"
#include "vanward.h"

#include <string>

namespace vanward {

class Session {
  public:
    Session() = default;
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;
    ~Session() { vwd_session_release(session_); }

    /**
     * The session for calls that use `threads` threads. Where ggml computes on OpenMP's threads, so does the session: they are the
     * same ones. Elsewhere they are the caller and a team beside it. NULL where it cannot be made; `error` says why.
     */
    vwd_session *use(int threads, std::string &error);

  private:
    static void parallel_for(void *self, uint64_t tasks, vwd_task task, void *work);

    Team team_;
    vwd_session *session_ = nullptr;
    int threads_ = 1;
};

/** Whether ggml's threads are OpenMP's, so that others can compute on them. */
bool shares_threads();

/** The message of this thread's last failed call. */
std::string last_error();

}  // namespace vanward
