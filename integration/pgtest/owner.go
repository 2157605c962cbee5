//go:build unix

package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// serverUser is whom PostgreSQL runs as when we are root, which it refuses to run as; nil: as ourselves.
func serverUser() *syscall.Credential {
	if os.Geteuid() != 0 {
		return nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uerr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
		if uerr == nil && gerr == nil && uid != 0 {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		}
	}
	return &syscall.Credential{Uid: 65534, Gid: 65534}
}

func describe(cred *syscall.Credential) string {
	if cred == nil {
		return fmt.Sprintf("uid %d", os.Geteuid())
	}
	return fmt.Sprintf("uid %d", cred.Uid)
}

// command is a program of PostgreSQL run as cred, in English, with no PG… variable of the caller's.
func command(ctx context.Context, cred *syscall.Credential, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "LC_")
	})
	cmd.Env = append(cmd.Env, "LC_ALL=C")
	cmd.WaitDelay = stopLimit
	return cmd
}

const dirPrefix = "pgxgated-pgtest-"

var sweepOnce sync.Once

// newOwnedDir makes a directory that cred can reach and this process owns: it holds the lock on owner.lock until it
// closes the file, or dies. First, once per process, it clears away those whose owners died.
func newOwnedDir(cred *syscall.Credential) (string, *os.File, error) {
	tmp, err := tempDir(cred)
	if err != nil {
		return "", nil, err
	}
	sweepOnce.Do(func() { sweep(tmp) })
	for range 10 {
		dir, err := os.MkdirTemp(tmp, dirPrefix)
		if err != nil {
			return "", nil, err
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			return "", nil, err
		}
		lock, err := tryLock(filepath.Join(dir, "owner.lock"), os.O_CREATE|os.O_RDWR)
		if err == nil {
			return dir, lock, nil
		}
		// A sweep came between creation and lock, and took it for a dead owner's.
		if !errors.Is(err, errLocked) && !os.IsNotExist(err) {
			return "", nil, err
		}
	}
	return "", nil, fmt.Errorf("no directory could be locked under %s", tmp)
}

// tempDir is os.TempDir, or a public one if cred cannot get there.
func tempDir(cred *syscall.Credential) (string, error) {
	for _, dir := range []string{os.TempDir(), "/var/tmp", "/tmp"} {
		// Resolved, because processes compares it with what the kernel says.
		if dir, err := filepath.EvalSymlinks(dir); err == nil && reachable(dir, cred) {
			return filepath.Abs(dir)
		}
	}
	return "", fmt.Errorf("%s cannot enter %s, /var/tmp or /tmp", describe(cred), os.TempDir())
}

// reachable says whether cred may enter dir and what leads to it.
func reachable(dir string, cred *syscall.Credential) bool {
	for cred != nil {
		fi, err := os.Stat(dir)
		if err != nil || fi.Mode()&0o001 == 0 && !(fi.Sys().(*syscall.Stat_t).Uid == cred.Uid && fi.Mode()&0o100 != 0) {
			return false
		}
		if dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	return true
}

var errLocked = errors.New("locked by another process")

// tryLock opens and locks a file without waiting; closing it, or the end of the process, unlocks it. The children a
// process execs do not inherit it.
func tryLock(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, flags|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		// A sweep may have removed the file after the open: then the lock is worth nothing.
		mine, e1 := f.Stat()
		now, e2 := os.Lstat(path)
		if e1 == nil && e2 == nil && os.SameFile(mine, now) {
			return f, nil
		}
		err = errLocked
	} else if errors.Is(err, syscall.EWOULDBLOCK) {
		err = errLocked
	}
	f.Close()
	return nil, err
}

// sweep ends the servers whose owners are dead and removes their directories. It touches only directories of our own uid.
func sweep(tmp string) {
	dirs, _ := filepath.Glob(filepath.Join(tmp, dirPrefix+"*"))
	for _, dir := range dirs {
		fi, err := os.Lstat(dir)
		if err != nil || !fi.IsDir() || int(fi.Sys().(*syscall.Stat_t).Uid) != os.Geteuid() {
			continue
		}
		lock, err := tryLock(filepath.Join(dir, "owner.lock"), os.O_RDWR)
		if os.IsNotExist(err) && time.Since(fi.ModTime()) > time.Hour {
			os.RemoveAll(dir) // its owner died before it could lock it
		}
		if err != nil {
			continue
		}
		data := filepath.Join(dir, "data")
		pids := processes(data)
		signalAll(pids, syscall.SIGCONT)
		signalAll(pids, syscall.SIGQUIT)
		if !waitGone(data, stopLimit) {
			signalAll(processes(data), syscall.SIGKILL)
			waitGone(data, stopLimit)
		}
		os.RemoveAll(dir)
		lock.Close()
	}
}

func signalAll(pids []int, sig syscall.Signal) {
	for _, pid := range pids {
		syscall.Kill(pid, sig)
	}
}

// waitGone waits until no process works in data, or limit has passed.
func waitGone(data string, limit time.Duration) bool {
	deadline := time.After(limit)
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for len(processes(data)) > 0 {
		select {
		case <-tick.C: // those that are not our children tell us nothing when they end
		case <-deadline:
			return false
		}
	}
	return true
}

// processes returns PostgreSQL's processes on a data directory. With /proc those are the ones that work in it, also if
// their postmaster is dead; elsewhere the postmaster started on it and its children.
func processes(data string) []int {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	if len(links) == 0 {
		return psProcesses(data)
	}
	var pids []int
	for _, link := range links {
		if cwd, _ := os.Readlink(link); strings.TrimSuffix(cwd, " (deleted)") != data {
			continue
		}
		proc := filepath.Dir(link)
		// Someone's shell in there is not ours to kill.
		if comm, _ := os.ReadFile(filepath.Join(proc, "comm")); strings.HasPrefix(string(comm), "postgres") {
			pid, _ := strconv.Atoi(filepath.Base(proc))
			pids = append(pids, pid)
		}
	}
	return pids
}

func psProcesses(data string) []int {
	out, err := exec.Command("ps", "-axo", "pid=,ppid=,args=").Output()
	if err != nil {
		return nil
	}
	var pids []int
	parents := make(map[int]int)
	postmaster := 0
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 3 {
			continue
		}
		pid, _ := strconv.Atoi(f[0])
		parents[pid], _ = strconv.Atoi(f[1])
		if strings.HasSuffix(f[2], "/postgres") && strings.Contains(lines.Text(), " -D "+data+" ") {
			postmaster = pid
			pids = append(pids, pid)
		}
	}
	for pid, parent := range parents {
		if postmaster != 0 && parent == postmaster {
			pids = append(pids, pid)
		}
	}
	return pids
}

// writeFile makes a file that every user can read, whatever our umask.
func writeFile(path, text string) error {
	return errors.Join(os.WriteFile(path, []byte(text), 0o644), os.Chmod(path, 0o644))
}
