#pragma once

#include <cstdio>
#include <cstdlib>

/** Ends the program where something is not so. */
#define CHECK(what)                                                 \
    do {                                                            \
        if (!(what)) {                                              \
            printf("line %d: not so: %s\n", __LINE__, #what);       \
            exit(1);                                                \
        }                                                           \
    } while (0)
