package main

import (
	"time"

	"golang.org/x/sys/unix"
)

// sleep sleeps d to some 0.1 ms. The runtime's timers are only good to a millisecond on an idle machine, which would be
// more than a refusal takes.
func sleep(d time.Duration) {
	left := unix.NsecToTimespec(int64(d))
	for unix.Nanosleep(&left, &left) == unix.EINTR {
	}
}
