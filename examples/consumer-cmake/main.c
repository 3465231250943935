/* A program outside this repository: it knows an installed Vanward only. */
#include <stdio.h>

#include <vanward.h>

int main(void) {
  vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
  options.device = VWD_DEVICE_CPU;
  vwd_session *session = NULL;
  if (vwd_session_create(&options, &session) != VWD_OK) return 1;
  vwd_session_details details = VWD_SESSION_DETAILS_INIT;
  vwd_status status = vwd_session_info(session, &details);
  printf("vanward %s on %s\n", vwd_version(), details.device_name);
  vwd_session_release(session);
  return status == VWD_OK && vwd_abi_version() == VWD_ABI_VERSION ? 0 : 1;
}
