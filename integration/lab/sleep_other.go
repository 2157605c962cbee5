//go:build unix && !linux

package main

import "time"

// sleep sleeps d, to about a millisecond.
func sleep(d time.Duration) { time.Sleep(d) }
