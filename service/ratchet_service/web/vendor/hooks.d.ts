/** The part of Preact's hooks that the pages use. */
type Update<T> = T | ((old: T) => T);
export function useState<T>(initial: T | (() => T)): [T, (next: Update<T>) => void];
export function useReducer<S, A>(reducer: (state: S, action: A) => S, initial: S): [S, (action: A) => void];
export function useRef<T>(initial: T): { current: T };
export function useEffect(effect: () => void | (() => void) | undefined, inputs?: readonly unknown[]): void;
export function useLayoutEffect(effect: () => void | (() => void) | undefined, inputs?: readonly unknown[]): void;
export function useMemo<T>(make: () => T, inputs: readonly unknown[]): T;
export function useCallback<T extends (...args: never[]) => unknown>(callback: T, inputs: readonly unknown[]): T;
export function useId(): string;
export function useErrorBoundary(callback?: (error: Error) => void): [Error | undefined, () => void];
