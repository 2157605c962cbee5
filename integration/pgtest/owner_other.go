//go:build unix && !linux

package pgtest

import "syscall"

// dieWithOwner can do nothing here: a ^C at the terminal reaches the server too, and the next run's sweep ends one whose
// owner was killed.
func dieWithOwner(*syscall.SysProcAttr) {}
