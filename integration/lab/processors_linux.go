package main

import (
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// allProcessors are those the lab was started on.
var allProcessors = func() (s unix.CPUSet) {
	_ = unix.SchedGetaffinity(0, &s)
	return s
}()

// twoProcessors names two of them.
func twoProcessors() (one, two unix.CPUSet, ok bool) {
	var found []int
	for i := 0; i < 1024 && len(found) < 2; i++ {
		if allProcessors.IsSet(i) {
			found = append(found, i)
		}
	}
	if len(found) < 2 {
		return one, two, false
	}
	one.Set(found[0])
	two.Set(found[1])
	return one, two, true
}

func setAffinity(pid int, s unix.CPUSet) error { return unix.SchedSetaffinity(pid, &s) }

// pinSelf moves every thread of the lab; threads and processes that are started later inherit it.
func pinSelf(s unix.CPUSet) error {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range tasks {
		id, _ := strconv.Atoi(t.Name())
		if err := unix.SchedSetaffinity(id, &s); err != nil && err != unix.ESRCH {
			return err
		}
	}
	runtime.GOMAXPROCS(max(s.Count(), 2)) // pause keeps one while it sleeps
	return nil
}

func dieWithParent(a *syscall.SysProcAttr) {
	// Of the thread, not the process; one that ends early takes the pooler along, and the experiment says so. The lab's
	// main goroutine keeps its thread.
	a.Pdeathsig = syscall.SIGTERM
}
